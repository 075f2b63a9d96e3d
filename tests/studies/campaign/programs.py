"""Small programs for tests of campaigns, written by hand."""

from dataclasses import dataclass

import torch

from shadowrun.studies.zoo.graph import Fill, Graph, Input, Node, Ref

aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    id: str
    graph: Graph


def parameter(name, *shape):
    return Input(name, shape, role="parameter", requires_grad=True, fill=Fill("normal", 0.0, 0.2))


MLP = Graph(
    (Input("x", (8, 32)), parameter("w", 32, 32), parameter("b", 32)),
    (
        Node(aten.addmm.default, (Ref(-3), Ref(-1), Ref(-2))),
        Node(aten.gelu.default, (Ref(0),)),
        Node(aten.native_layer_norm.default, (Ref(1), (32,), None, None, 1e-5)),
        Node(aten.add.Tensor, (Ref(2), Ref(-1))),
        Node(aten._softmax.default, (Ref(3), -1, False)),
        Node(aten.view.default, (Ref(4), (2, 4, 32))),
        Node(aten.mean.dim, (Ref(5), (1,), True)),
    ),
    (Ref(6), Ref(0)),
)
CONV = Graph(
    (Input("x", (2, 3, 8, 8)), parameter("w", 4, 3, 3, 3), parameter("b", 4), parameter("fc", 4, 5)),
    (
        Node(aten.convolution.default, (Ref(-1), Ref(-2), Ref(-3), (1, 1), (1, 1), (1, 1), False, (0, 0), 1)),
        Node(aten.relu.default, (Ref(0),)),
        Node(aten.max_pool2d_with_indices.default, (Ref(1), (2, 2), (2, 2), (0, 0), (1, 1), False)),
        Node(aten.mean.dim, (Ref(2), (2, 3), False)),
        Node(aten.mm.default, (Ref(3), Ref(-4))),
    ),
    (Ref(4),),
)
EMBEDDING = Graph(
    (Input("ids", (2, 6), torch.int64, Fill("integers", 0, 9)), parameter("table", 10, 16), parameter("w", 16, 16)),
    (
        Node(aten.embedding.default, (Ref(-2), Ref(-1))),
        Node(aten.view.default, (Ref(0), (12, 16))),
        Node(aten.mm.default, (Ref(1), Ref(-3))),
        Node(aten.view.default, (Ref(2), (2, 6, 16))),
        Node(aten.split.Tensor, (Ref(3), 8, 2)),
        Node(aten.mul.Tensor, (Ref(4, 0), Ref(4, 1))),
        Node(aten.argmax.default, (Ref(5), -1)),
        Node(aten.embedding.default, (Ref(-2), Ref(6))),
    ),
    (Ref(5), Ref(7)),
)
POINTWISE = Graph(
    (Input("x", (5, 7)), Input("y", (7,))),
    (
        Node(aten.mul.Tensor, (Ref(-1), Ref(-2))),
        Node(aten.sigmoid.default, (Ref(0),)),
        Node(aten.add.Tensor, (Ref(1), Ref(-1)), (("alpha", 2),)),
        Node(aten.clamp.default, (Ref(2), -1.0, 1.0)),
    ),
    (Ref(3),),
)
PROGRAMS = [Program(g.identity()[:12], g) for g in (MLP, CONV, EMBEDDING, POINTWISE)]
BY_ID = {p.id: p for p in PROGRAMS}
