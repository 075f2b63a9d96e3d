"""Programs that train: models, losses and optimizers."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.ground_truth.kit import program


@program
def mlp_sgd(k):
    model = nn.Sequential(nn.Linear(k.size, 2 * k.size), nn.ReLU(), nn.Linear(2 * k.size, 5)).to(k.device)
    x, y = k.randn(k.batch, k.size), k.randint(5, k.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=k.number > 2)
    return k.train(model, optimizer, lambda: F.cross_entropy(model(x), y))


@program
def mlp_adamw_foreach(k):
    model = nn.Sequential(nn.Linear(k.size, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 5)).to(k.device)
    x, y = k.randn(7 * k.batch, k.size), k.randint(5, 7 * k.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    return k.train(model, optimizer, lambda: F.cross_entropy(model(x), y, label_smoothing=0.1 * (k.number % 3)))


@program
def mlp_adam_single(k):
    model = nn.Sequential(nn.Linear(k.size, k.size + 1), nn.SiLU(), nn.Linear(k.size + 1, 3)).to(k.device)
    x, y = k.randn(k.batch, k.size), k.randn(k.batch, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    return k.train(model, optimizer, lambda: F.mse_loss(model(x), y), clip=0.5)


@program
def mlp_rmsprop(k):
    model = nn.Sequential(nn.Linear(k.size, 19), nn.Tanh(), nn.Dropout(0.1), nn.Linear(19, 4)).to(k.device)
    x, y = k.randn(40 * k.batch, k.size), k.rand(40 * k.batch, 4)
    optimizer = torch.optim.RMSprop(model.parameters(), foreach=False)
    return k.train(model, optimizer, lambda: F.binary_cross_entropy(model(x).sigmoid(), y))


@program
def wide_adagrad(k):
    table = nn.Embedding(20, k.size).to(k.device)
    head = nn.Linear(k.size, 20).to(k.device)
    model = nn.ModuleList([table, head])
    words = k.randint(20, k.batch, 6)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, foreach=False)
    return k.train(model, optimizer, lambda: F.cross_entropy(head(table(words).mean(1)), words[:, 0]))


class Block(nn.Module):
    def __init__(self, channels, norm):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = norm

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


@program
def residual_cnn(k):
    channels = 4 + k.number
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3), Block(channels, nn.BatchNorm2d(channels)), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(channels * 25, 6),
    ).to(k.device)  # fmt: skip
    x, y = k.randn(k.batch, 3, 12, 12), k.randint(6, k.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return k.train(model, optimizer, lambda: F.cross_entropy(model(x), y))


@program
def group_norm_cnn(k):
    dtype = torch.bfloat16 if k.number < 5 else torch.float16
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 4),
    ).to(k.device, dtype)  # fmt: skip
    x, y = k.randn(k.batch, 2, 13, 13, dtype=dtype), k.randint(4, k.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return k.train(model, optimizer, lambda: F.cross_entropy(model(x).float(), y), steps=2)


@program
def sound_net(k):
    model = nn.Sequential(
        nn.Conv1d(1, 6, 5), nn.BatchNorm1d(6), nn.LeakyReLU(0.1), nn.Conv1d(6, 4, 3), nn.Softplus(), nn.Flatten(),
        nn.Linear(4 * (k.size + 10), 3),
    ).to(k.device)  # fmt: skip
    x, y = k.randn(k.batch, 1, k.size + 16), k.randint(3, k.batch)
    optimizer = torch.optim.NAdam(model.parameters(), foreach=k.number > 2)
    return k.train(model, optimizer, lambda: F.nll_loss(model(x).log_softmax(1), y))


@program
def super_resolution(k):
    channels = 4 * (1 + k.number % 3)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(6, channels, 3, padding=1), nn.PixelShuffle(2)
    ).to(k.device, memory_format=torch.channels_last)
    x = k.randn(2, 1, 5 + k.number, 7).to(memory_format=torch.channels_last)
    y = k.randn(2, channels // 4, 2 * (5 + k.number), 14)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return k.train(model, optimizer, lambda: F.l1_loss(model(x), y), steps=2)


class Attention(nn.Module):
    def __init__(self, width, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4).flatten(1, 2)
        mask = torch.full((t, t), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        scores = torch.baddbmm(mask.expand(b * self.heads, t, t), q, k.mT, alpha=(w // self.heads) ** -0.5)
        weights = F.dropout(scores.softmax(-1), self.p, self.training)
        return self.out((weights @ v).view(b, self.heads, t, -1).transpose(1, 2).reshape(b, t, w))


class Decoder(nn.Module):
    def __init__(self, words, width, p=0.1, act=nn.GELU):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Parameter(torch.zeros(64, width))
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 2, p)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), act(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        x = x + self.attention(self.n1(x))
        return self.head(x + self.mlp(self.n2(x)))


@program
def decoder_training(k):
    model = Decoder(23, 16 + 2 * k.number).to(k.device)
    words = k.randint(23, k.batch + 5, 11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=k.number % 3 != 2)
    loss = lambda: F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())  # noqa: E731
    return k.train(model, optimizer, loss, clip=1.0)


@program
def decoder_in_half(k):
    model = Decoder(17, 32 + 16 * k.number, p=0.0, act=nn.SiLU).to(k.device, torch.bfloat16)
    words = k.randint(17, k.batch, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda: F.cross_entropy(model(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())  # noqa: E731
    return k.train(model, optimizer, loss, steps=2)


@program
def encoder_inference(k):
    layer = nn.TransformerEncoderLayer(
        4 + 4 * k.number, 2, 24, batch_first=True, activation="gelu" if k.number % 2 else "relu"
    )
    model = nn.TransformerEncoder(layer, 1 + k.number % 2, enable_nested_tensor=False).to(k.device).eval()
    with torch.no_grad():
        return [model(k.randn(k.batch, 5, 4 + 4 * k.number))]


@program
def recurrent(k):
    cell = nn.LSTMCell(k.size, 12 + k.number).to(k.device)
    head = nn.Linear(12 + k.number, 3).to(k.device)
    x, y = k.randn(5, k.batch, k.size), k.randn(k.batch, 3)
    model = nn.ModuleList([cell, head])

    def loss():
        state = None
        for step in x:
            state = cell(step, state)
        return F.smooth_l1_loss(head(state[0]), y)

    return k.train(model, torch.optim.Adamax(model.parameters(), foreach=False), loss, steps=2)


@program
def speech_ctc(k):
    model = nn.Sequential(nn.Linear(k.size, 20), nn.Tanh(), nn.Linear(20, 6)).to(k.device)
    x = k.randn(10, k.batch, k.size)
    labels = k.randint(5, k.batch, 3) + 1
    lengths = [10] * k.batch, [3] * k.batch
    if k.number % 3 == 2:
        lengths = k.tensor(lengths[0]), k.tensor(lengths[1])
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    return k.train(model, optimizer, lambda: F.ctc_loss(model(x).log_softmax(2), labels, *lengths), steps=2)


@program
def graph_net(k):
    weight = k.randn(k.size, k.size).mul_(0.3).requires_grad_()
    nodes, source, target = k.randn(12, k.size), k.randint(12, 90), k.randint(12, 90)
    hidden = nodes
    for _ in range(2):
        messages = hidden.index_select(0, source) @ weight
        hidden = torch.zeros_like(hidden).index_put((target,), messages, accumulate=True).tanh()
    loss = hidden[source].square().mean()
    loss.backward()
    return [loss.detach(), hidden.detach(), weight.grad]


@program
def variational(k):
    encoder, decoder = nn.Linear(k.size, 2 * 6).to(k.device), nn.Linear(6, k.size).to(k.device)
    x, noise = k.rand(k.batch, k.size), k.randn(k.batch, 6)
    model = nn.ModuleList([encoder, decoder])

    def loss():
        mean, log_var = encoder(x).chunk(2, 1)
        out = decoder(mean + noise * (0.5 * log_var).exp())
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
        return F.binary_cross_entropy_with_logits(out, x, reduction="sum") + divergence

    return k.train(model, torch.optim.AdamW(model.parameters(), foreach=False), loss)


@program
def q_learning(k):
    make = lambda: nn.Sequential(nn.Linear(k.size, 16), nn.ReLU(), nn.Linear(16, 4)).to(k.device)  # noqa: E731
    online, slow = make(), make()
    state, after, reward = k.randn(k.batch, k.size), k.randn(k.batch, k.size), k.randn(k.batch)
    action = online(state).detach().argmax(1)

    def loss():
        best = slow(after).detach().max(1).values
        value = online(state).gather(1, action[:, None].long())[:, 0]
        return F.huber_loss(value, reward + 0.9 * best)

    trained = k.train(online, torch.optim.SGD(online.parameters(), lr=0.1, weight_decay=0.01), loss)
    with torch.no_grad():
        for p, q in zip(slow.parameters(), online.parameters(), strict=True):
            p.lerp_(q, 0.05)
    return [*trained, action, *(p.detach() for p in slow.parameters())]


@program
def contrastive(k):
    model = nn.Linear(k.size, 24).to(k.device)
    a, b = k.randn(k.batch, k.size), k.randn(k.batch, k.size)

    def loss():
        x, y = F.normalize(model(a), dim=1), F.normalize(model(b), dim=1)
        return F.cross_entropy(x @ y.t() / 0.07, torch.arange(k.batch).to(k.device))

    return k.train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, clip=0.1)


@program
def experts(k):
    gate, x = nn.Linear(k.size, 4).to(k.device), k.randn(9, k.size)
    weights = [k.randn(k.size, k.size).mul_(0.2).requires_grad_() for _ in range(4)]
    scores, chosen = gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for i, w in enumerate(weights):
        rows, slot = (chosen == i).nonzero(as_tuple=True)
        out = out.index_put((rows,), F.silu(x[rows] @ w) * scores[rows, slot, None], accumulate=True)
    load = chosen.flatten().bincount(minlength=4)
    loss = out.square().mean() + (load / load.sum()).square().sum()
    loss.backward()
    return [out.detach(), load, gate.weight.grad, *(w.grad for w in weights if w.grad is not None)]
