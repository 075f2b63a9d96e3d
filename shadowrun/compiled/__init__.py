"""torch.compile against eager: each graph that it compiles runs both ways on the same inputs.

`check` is the command, `regions` the comparison of a running program. `backend` sees the graphs, `judging` compares
values, `localise` names nodes, `stage_bisect` the stage of compilation. Private APIs of torch's compiler are in
`torchcompile` and `torchregions` only.
"""

from __future__ import annotations
