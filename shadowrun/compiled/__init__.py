"""torch.compile against eager: each graph that it compiles runs both ways on the same inputs.

`check` is the command, `regions` the comparison of a running program. `backend` sees the graphs, `accuracy` compares
values, `fault_location` finds the nodes and the stage of compilation at fault, `repro` writes scripts.
Private APIs of torch's compiler are in `torchcompile` and `regions/torchregions` only.
"""

from __future__ import annotations
