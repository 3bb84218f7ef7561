"""A small KDA language model, trained at byte level on text that it makes.

    python examples/language_model.py
    python examples/language_model.py --compare
    python examples/language_model.py --backend reference --layers 1 --steps 100

On a Hopper GPU `chunk_kda` runs its kernels, elsewhere its reference, at a smaller size.  The text
states facts, replaces them, and asks for them:

    Ada 3 red cups. Bob 7 tan pens. Ada? 3 red cups. Ada 5 blue hats. Ada? 5 blue hats. ...

so each answer is in what the model read, and nowhere else.  Two losses are drawn: over all bytes, and
over the bytes of answers that only memory can tell (the digit, the first letters of the two words).
Every step reads new text, so neither is a loss on text seen before.

--compare trains twice from the same seed, on kernels and reference.  Exit code 1 when the final
losses (means of the last 20 steps) differ by more than 1 %, or aren't below the entropy of single
bytes.
"""

import argparse
import importlib.util
import math
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from kda_model import LanguageModel
from torch import nn
from tqdm import tqdm

import kda_cute

LEARNING_RATE, WEIGHT_DECAY, WARM_UP, CLIP = 4e-3, 0.05, 0.1, 1.0
LAST, TOLERANCE = 20, 0.01

NAMES = ("Ada", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal")
# What a fact says: in each group eight words, told apart by their first bytes.
WORDS = (
    tuple("23456789"),
    ("red", "blue", "tan", "pink", "grey", "ochre", "violet", "white"),
    ("cups", "lamps", "pens", "keys", "ropes", "nails", "hats", "drums"),
)


class Size(NamedTuple):
    layers: int
    heads: int
    batch: int
    sequence: int
    steps: int


SIZES = {
    "kernels": Size(layers=4, heads=4, batch=8, sequence=1024, steps=400),
    "reference": Size(layers=2, heads=1, batch=8, sequence=128, steps=60),
    # The reference is float64: this is what it trains on a GPU in half a minute.
    "compare": Size(layers=2, heads=2, batch=4, sequence=256, steps=100),
}


# ---------------------------------------------------------------- text
def make_text(rng: random.Random, length: int) -> tuple[bytes, list[bool]]:
    """`length` bytes of facts and questions, and which of them only memory can tell."""
    text, recall, facts = bytearray(), [], {}

    def write(piece, known=False):
        text.extend(piece.encode())
        recall.extend([known] + [False] * (len(piece) - 1))

    while len(text) < length:
        asked = bool(facts) and rng.random() < 0.6
        name = rng.choice(list(facts) if asked else NAMES)
        if not asked:
            facts[name] = [rng.choice(words) for words in WORDS]
        write(f"{name}? " if asked else f"{name} ")
        for word, after in zip(facts[name], (" ", " ", ". "), strict=True):
            write(word + after, known=asked)
    return bytes(text[:length]), recall[:length]


def make_batch(rng: random.Random, size: Size, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes int64, recall bool), both [batch, sequence + 1]; every row begins without facts."""
    rows = [make_text(rng, size.sequence + 1) for _ in range(size.batch)]
    tokens = torch.tensor([list(text) for text, _ in rows])
    return tokens.to(device), torch.tensor([recall for _, recall in rows]).to(device)


# ---------------------------------------------------------------- training
class Losses(NamedTuple):
    """Nats per byte, a number per step; `entropy` is that of single bytes of the text read."""

    all: list[float]
    recall: list[float]
    entropy: float

    def final(self) -> tuple[float, float]:
        """Means of the last steps: over all bytes, over those that only memory can tell."""
        a, b = (torch.tensor(x[-LAST:]).nanmean().item() for x in (self.all, self.recall))
        return a, b


def make_optimizer(model: nn.Module, steps: int):
    """(AdamW, its schedule: linear warm-up, then a cosine to a tenth)."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, LEARNING_RATE, (0.9, 0.95), weight_decay=WEIGHT_DECAY)
    warm_up = max(1, round(WARM_UP * steps))

    def factor(step):
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def losses_of(model: nn.Module, tokens, recall) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over all bytes, and over those of `recall` (NaN when there are none)."""
    # The weights stay fp32. Matrix products in bf16 are slow on most CPUs.
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return loss.mean(), loss.detach()[recall[:, 1:].flatten()].mean()


def training_step(model, optimizer, tokens, recall) -> tuple[float, float]:
    """One update; the losses before it."""
    loss, of_recall = losses_of(model, tokens, recall)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item(), of_recall.item()


def train(size: Size, backend: str, device: torch.device, seed: int) -> Losses:
    torch.manual_seed(seed)
    model = LanguageModel(size.layers, size.heads, backend).to(device)
    optimizer, schedule = make_optimizer(model, size.steps)
    rng, counts, losses = random.Random(seed), torch.zeros(256), []
    with tqdm(range(size.steps), desc=backend, unit="step") as bar:
        for _ in bar:
            tokens, recall = make_batch(rng, size, device)
            losses.append(training_step(model, optimizer, tokens, recall))
            schedule.step()
            counts += tokens[:, 1:].flatten().bincount(minlength=256).cpu()
            bar.set_postfix(loss=f"{losses[-1][0]:.3f}", recall=f"{losses[-1][1]:.3f}")
    entropy = torch.distributions.Categorical(counts).entropy().item()
    return Losses(*map(list, zip(*losses, strict=True)), entropy)


# ---------------------------------------------------------------- results
def draw(runs: dict[str, Losses], path: Path):
    """Loss curves as a PNG without background, in colours that show on a light and a dark page."""
    from matplotlib.figure import Figure  # here: training needs no matplotlib

    grey, lines = "#7c7c7c", {"kernels": ("#2f86d6", 1.6), "reference": ("#d9730d", 1.6)}
    if len(runs) == 2:  # the curves coincide: a thin one on a wide one
        lines["reference"] = ("#d9730d", 4.0)
    entropy = next(iter(runs.values())).entropy
    panels = (("all", "all bytes", entropy, "entropy of single bytes"),
              ("recall", "bytes that only memory can tell", math.log(8), "a guess, ln 8"))  # fmt: skip
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (field, title, level, label) in zip(figure.subplots(1, 2), panels, strict=True):
        for name in sorted(runs, reverse=True):
            colour, width = lines[name]
            axes.plot(getattr(runs[name], field), color=colour, lw=width, label=f"backend {name}")
        axes.axhline(level, color=grey, ls="--", lw=1.2, label=f"{label}: {level:.2f}")
        axes.set_title(title, color=grey, fontsize=12)
        axes.set_xlabel("step", color=grey, fontsize=11)
        axes.set_ylim(bottom=0)
        axes.tick_params(colors=grey, labelsize=10)
        axes.spines[:].set_color(grey)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, labelcolor=grey, fontsize=10)
    figure.axes[0].set_ylabel("loss, nats per byte", color=grey, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, transparent=True)


def agree(runs: dict[str, Losses]) -> bool:
    """Print whether the runs ended alike, having learned; False where they didn't."""
    a, b = (runs[name].final()[0] for name in kda_cute.chunk.BACKENDS)
    gap = abs(a - b) / b
    learned = max(a, b) < runs["reference"].entropy
    passed = gap <= TOLERANCE and learned  # False for NaN
    print(
        f"\n{'ok' if passed else 'FAIL'}: final losses differ by {gap:.3%}, allowed {TOLERANCE:.0%}"
    )
    if not learned:
        print("FAIL: they are not below the entropy of single bytes: train for more steps")
    return passed


def missing_gpu() -> str | None:
    """Why the kernels can't run here, or None."""
    if not torch.cuda.is_available():
        return "no Hopper GPU found"
    found, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    return None if found == (9, 0) else f"{name} is not a Hopper GPU"


def parse(argv: list[str] | None, missing: str | None) -> tuple[argparse.Namespace, Size]:
    """Options, with `backends` to train with, and the size; `missing` as from `missing_gpu`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend", choices=kda_cute.chunk.BACKENDS, help="default: what runs here"
    )
    parser.add_argument("--compare", action="store_true", help="train with both and compare")
    for name in Size._fields:
        defaults = ", ".join(f"{getattr(s, name)} ({which})" for which, s in SIZES.items())
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=f"default {defaults}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("build/language_model.png"), help="the loss curve, a PNG"
    )
    parser.add_argument("--no-plot", action="store_true", help="no curve: needs no matplotlib")
    args = parser.parse_args(argv)
    if args.compare and args.backend:
        parser.error("--compare trains with both backends: leave out --backend")
    if missing and (args.compare or args.backend == "kernels"):
        parser.error(f"the kernels need a Hopper GPU: {missing}")
    backend = args.backend or ("reference" if missing else "kernels")
    args.backends = kda_cute.chunk.BACKENDS if args.compare else (backend,)
    size = SIZES["compare" if args.compare else backend]
    given = {name: getattr(args, name) for name in Size._fields if getattr(args, name)}
    return args, size._replace(**given)


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    missing = missing_gpu()
    args, size = parse(argv, missing)
    if not args.no_plot and importlib.util.find_spec("matplotlib") is None:
        print("the loss curve needs matplotlib: pip install -e '.[examples]', or add --no-plot")
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    why = f" ({missing})" if missing else ""
    numbers = ", ".join(f"{name} {value}" for name, value in size._asdict().items())
    print(f"KDA language model: {numbers}, seed {args.seed}")
    print(make_text(random.Random(args.seed), 72)[0].decode(), "...\n", flush=True)

    runs = {}
    for backend in args.backends:
        started = time.perf_counter()
        runs[backend] = losses = train(size, backend, device, args.seed)
        took = time.perf_counter() - started
        final, recall = losses.final()
        print(f"\nbackend {backend} on {where}{why}: {took:.1f} s")
        print(f"nats per byte: {losses.all[0]:.3f} at first, {final:.4f} at last", end="")
        print(f" (mean of {len(losses.all[-LAST:])} steps); single bytes {losses.entropy:.3f}")
        print(
            f"where only memory can tell: {recall:.4f} at last; a guess {math.log(8):.3f}",
            flush=True,
        )
    if not args.no_plot:
        draw(runs, args.out)
        print(f"\nloss curve: {args.out}")
    return 0 if not args.compare or agree(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
