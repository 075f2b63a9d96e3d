"""Programs on data: generation, statistics, signals, exceptional values, layouts."""

import torch
from torch.nn import functional as F

from tests.ground_truth.kit import program
from tests.ground_truth.programs_training import Decoder

_NAN, _INF = float("nan"), float("inf")


@program
@torch.no_grad()
def generation(k):
    model = Decoder(31, 16 + 4 * k.number).to(k.device).eval()
    words, seen = k.randint(31, 2, 3), []
    stop = k.tensor([1, 2])
    for _ in range(4):
        scores, order = model(words)[:, -1].log_softmax(-1).sort(descending=True)
        seen.append(scores.exp().cumsum(-1))
        chosen = scores.masked_fill(seen[-1] > 0.9, -_INF).argmax(-1, keepdim=True).long()
        words = torch.cat([words, order.gather(1, chosen)], 1)
        seen.append(torch.isin(words, stop))
    return [words, *seen]


@program
@torch.no_grad()
def beam_search(k):
    table, beams = k.randn(12, 12), k.randint(12, 3)
    total, kept = k.tensor([0.0, -1.0, -2.0]), []
    for _ in range(6):
        step = (table.index_select(0, beams) * (1 + len(kept))).round().log_softmax(-1)
        total, flat = (total[:, None] + step).view(-1).topk(3)
        beams = flat % 12
        kept += [step, total, beams]
    return kept


@program
def ranking(k):
    scores = k.randint(5, k.batch, k.size).float()
    order = scores.argsort(-1)
    best = scores.topk(3, -1)
    median = scores.kthvalue(k.size // 2, -1)
    running = k.randn(k.batch, k.size).cummax(1)
    return [order, *best, median.values, *running, scores.amax(1), scores.argmin(1)]


@program
def statistics(k):
    x = k.randn(500, k.size)
    classes = k.randint(9, 500)
    return [
        x.histc(10), classes.bincount(), x[:, 0].kthvalue(250).values, x.cumsum(0), x.var(0), x.sum(), x.sum(1),
        x.mean(0), x.double().logsumexp(1), x.norm(dim=1), torch.isin(classes, k.tensor([1, 3])), x.cummax(0).values,
        torch.zeros(9, device=k.device).index_put_((classes,), x[:, 1], accumulate=True), x.half().float().std(),
    ]  # fmt: skip


@program
def histograms(k):
    image = k.rand(30, 10 * k.size)
    counts = torch.stack([row.histc(16, 0, 1) for row in image])
    share = counts.cumsum(1) / counts.sum(1, keepdim=True)
    levels = (image * 15).long().flatten().bincount(minlength=16)
    unusual = torch.isin((image * 255).round().to(torch.int32), k.tensor([0, 255], torch.int32))
    return [share, levels, unusual, image.flatten().kthvalue(7).values]


@program
def mixture(k):
    x, centers = k.randn(k.batch, 1, 3).double(), k.randn(1, k.size, 3).double()
    log = -(x - centers).square().sum(-1) / 2
    evidence = log.logsumexp(1)
    member = (log - evidence[:, None]).exp()
    return [evidence, member, member.argmax(1), (member[..., None] * x).sum(0) / member.sum(0)[:, None]]


@program
def dirty_data(k):
    x = k.randn(k.batch, k.size)
    x.view(-1)[:: 5 + k.number] = _NAN
    x.view(-1)[1 :: 11 + k.number] = _INF
    top = torch.maximum(x, x.roll(1, 1))
    clipped = x.clamp(-1, 1)
    return [
        top, torch.minimum(x, k.tensor(0.5)), clipped, x.amax(1), x.amin(0), x.max(), x.max(1).values, x.clamp_min(0),
        x.to(torch.int32), x.abs().sqrt(), x.sqrt(), F.relu(x), x.nanmean(), x.tril(), x.clone().clamp_(0, 3),
    ]  # fmt: skip


@program
def sensors(k):
    raw = k.randn(4, 10 * k.size) * 20
    raw[1, 3] = raw[2, 5] = _NAN
    level = raw.clamp(min=-5)
    power = torch.where(raw.isnan(), raw, (raw - 1).sqrt())
    return [
        level, raw.round().to(torch.int16), power, raw.min(1).values, torch.maximum(raw[0], raw[1]), level.long(),
        torch.remainder(raw, 7), raw[:, ::2].mul_(0.5), raw.neg(),
    ]  # fmt: skip


@program
def masks(k):
    scores = k.randn(k.size, k.size)
    hidden = torch.full_like(scores, -_INF).triu(1)
    below = torch.where(scores > 1.5, k.tensor(_INF), scores).tril()
    weights = (scores + hidden).softmax(-1)
    rounded = torch.full((2, k.size, k.size), -_INF, device=k.device).tril_(-1)
    return [hidden, below, weights, rounded, (weights @ scores).tril(), weights.sum(0)]


@program
def buffers(k):
    a, b = k.randn(3, 5, k.size), k.randn(3, k.size, 4)
    unset = torch.full((3, 5, 4), _NAN).to(k.device)
    first = torch.baddbmm(unset, a, b, beta=0)
    unset.baddbmm_(a, b, beta=0, alpha=0.5)
    return [first, unset, torch.bmm(a, b), torch.baddbmm(first, a, b)]


@program
def spectrum(k):
    wave = k.randn(3, 4 * k.size)
    z = torch.fft.rfft(wave)
    size = torch.hypot(z.real, z.imag * 1e25)
    phase = torch.remainder(torch.atan2(z.imag, z.real) + 7, 6.2831853)
    back = torch.fft.irfft(z, n=wave.shape[-1])
    return [size, phase, back, torch.stft(wave, 8, window=torch.ones(8, device=k.device), return_complex=True).abs()]


@program
def orbits(k):
    place, speed = k.randn(k.size, 2).double(), k.randn(k.size, 2).double()
    for _ in range(5):
        r = torch.hypot(place[:, 0], place[:, 1])
        speed = speed - 0.01 * place / (r**3 + 0.1)[:, None]
        place = place + 0.01 * speed
    far = torch.hypot(place[:, 0].float() * 1e30, speed[:, 0].float() * 1e30)
    return [place, speed, far, torch.remainder(torch.atan2(place[:, 1], place[:, 0]), 3)]


@program
def hyperbolic(k):
    x = k.randn(k.batch, k.size) * 15
    edge = torch.cat([x.flatten(), k.tensor([88.9, 89.1, -89.2, 88.3, -88.9])])
    return [edge.sinh(), edge.cosh(), edge.exp(), x.div(8).sinh_(), x.div(8).cosh_(), x.tanh(), F.softplus(x.half())]


@program
def catenary(k):
    span = torch.linspace(-89.3, 89.3, 7 * k.size).to(k.device)
    height, slope = span.cosh(), span.sinh()
    growth = (span * 0.996).exp()
    return [height, slope, growth, (slope / height).clamp(-1, 1), torch.hypot(slope, height)]


@program
def quantised(k):
    x = k.randn(k.batch, k.size)
    scale = x.abs().amax() / 127
    q = (x / scale).round().clamp(-128, 127)
    tiny = k.rand(k.size) * 1e-38
    small = tiny * k.rand(k.size)
    return [q, q.to(torch.int8), q * scale, tiny, small, small.mul_(0.5), torch.round(x, decimals=1), x.round()]


@program
def probabilities(k):
    p = k.rand(k.batch, k.size).mul(60).neg().exp()
    joint = p
    for _ in range(3):
        joint = joint * p.roll(1, 1)
    entropy = -(p * p.log()).sum(1)
    steps = [(p * (i + 1)).log_softmax(1) for i in range(7)]
    return [joint, entropy, joint.sum(), F.softplus(p.half()), F.gelu(p - 0.5), F.silu(p), *steps]


@program
def layouts(k):
    x = k.randn(k.size, 7)
    table = k.randn(k.batch, 2 * k.size)
    table[:, ::2].mul_(k.randn(k.size))
    table.t().mul_(0.5)
    image = k.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    return [
        F.leaky_relu(x.t()), F.leaky_relu(image, 0.3), table, x.sigmoid(), image.sigmoid(), x.t() @ x,
        F.pixel_shuffle(k.randn(1, 8, 5, k.size), 2), x.index_select(1, k.tensor([0, 6, 3])), F.silu(x), F.gelu(x.t()),
        x.argmax(), x.argmax(1), F.max_pool2d(image, 2), F.layer_norm(k.randn(50, k.size * 2), (k.size * 2,)),
    ]  # fmt: skip


@program
def half_products(k):
    dtype = (torch.bfloat16, torch.float16)[k.number // 2 % 2]
    depth = 600 + 16 * k.size
    a, b = k.randn(9, depth, dtype=dtype), k.randn(depth, 7, dtype=dtype)
    c = k.randn(2, 6, 256 + k.size, dtype=dtype)
    bias = k.randn(7, dtype=dtype)
    return [a @ b, torch.addmm(bias, a, b), c @ c.mT, F.linear(a, b.t(), bias), F.softplus(bias), bias.sum()]


@program
def moving_average(k):
    weights, shadow = k.randn(k.size, 5), k.randn(k.size, 5)
    trace = []
    for step in range(4):
        weights.add_(k.randn(k.size, 5), alpha=0.1)
        shadow.lerp_(weights, 0.1 * (step + 1))
        weights.t()[1:3].mul_(0.9)
        trace += [torch.lerp(shadow, weights, 0.25), shadow.clone()]
    return [weights, shadow, *trace, torch.linalg.vector_norm(weights), F.dropout(weights.new_ones(3000), 0.2)]
