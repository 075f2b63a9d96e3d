"""torch.compile against eager: each graph that it compiles, run both ways on the same inputs.

`check` puts together; `backend` sees the graphs, `judging` compares values, `localise` names nodes, `ladder` the stage.
Private APIs of torch's compiler are in `torchcompile` only.
"""

from __future__ import annotations
