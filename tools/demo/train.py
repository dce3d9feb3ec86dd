"""Trains the demo model: the tower first with dense labels, then everything on questions. Can be stopped and continued.

    python -m tools.demo.train --run runs/demo --steps 12000 --tower-steps 2500 [--minutes 90]
    python -m tools.demo.train --design pixtral --teacher models/demo --run runs/demo-pixtral --steps 9000

One step takes a batch of its own on every thread; threads meet once a step, so a busy machine slows it down by no more
than the cores it takes away. The learning rate follows the step, so a run that was stopped goes on where it was.

A teacher, the Isaac demo, makes a second model cheap: its language model starts from the teacher's, learns from the
teacher's embeddings until the tower can see, and the tower learns to give those embeddings.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tools.demo import questions, tokenizer
from tools.demo.batches import Batch, BatchMaker, Pictures, draw_pictures, drill
from tools.demo.design import DESIGNS
from tools.demo.evaluate import exact_answers
from tools.demo.model import DemoModel
from tools.demo.optimizer import Muon, split_parameters
from tools.demo.pictures import Scene
from tools.demo.teacher import Teacher

#: AdamW's learning rate falls from peak to final over the whole run; Muon's is a multiple of it
PEAK_RATE, FINAL_RATE, WARM_UP = 1e-3, 1e-5, 50
MUON_FACTOR = 2.5
#: larger grids are drawn more often in training
CROWDING = 1.0
#: the tower is trained alone until it names this share of covered tokens right, or its steps are done
TOWER_GOAL = 0.9
#: weight of the auxiliary loss before and after the tower names ``WELL_NAMED`` of the covered tokens right
AUXILIARY_WEIGHTS, WELL_NAMED = (1.0, 0.3), 0.92
#: 3 × 3 cells come once less than this share of answer tokens is wrong
READY = 0.08
#: weight of telling rows and columns inside the language model
PLACE_WEIGHT = 0.3
#: shares of batches that show two images, put the question first, and hold a conversation
PAIRS, QUESTION_FIRST, CONVERSATIONS = 0.55, 0.08, 0.07
#: questions about each pair
PAIR_QUESTIONS = 10
#: share of later steps that go to the tower alone, with crowded pictures that hold mostly digits: they cost half of a
#: whole step and show many times the handwriting, which takes longest to learn
REHEARSALS, REHEARSED_CROWDING, REHEARSED_DIGITS = 0.33, 3.0, 0.75
#: share of the tower's own steps until it is done, when the language model can learn from a teacher meanwhile
TAUGHT = 0.85
LOG_SECONDS, SAVE_SECONDS, CHECK_PICTURES = 30.0, 240.0, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--steps", type=int, default=12_000, help="of the whole run")
    parser.add_argument("--tower-steps", type=int, default=2_500, help="at most so many of them for the tower alone")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop this call after so long")
    parser.add_argument("--threads", type=int, default=2, help="batches worked on at a time, one core each")
    parser.add_argument("--pictures", type=int, default=6, help="of one thread's share of a step, an even number")
    parser.add_argument("--start", type=Path, help="an exported checkpoint to begin a new run with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--design", choices=DESIGNS, default="isaac")
    parser.add_argument("--teacher", type=Path, help="an exported Isaac demo that helps to train another design")
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    model = DemoModel.from_checkpoint(options.start) if options.start else DemoModel(DESIGNS[options.design])
    trainer = Trainer(
        model,
        options.run,
        options.steps,
        options.tower_steps,
        options.threads,
        options.pictures,
        options.seed,
        Teacher(options.teacher) if options.teacher else None,
    )
    trainer.run(options.minutes * 60)


@dataclass
class Progress:
    """How far a run has come; the shares are running means over about 50 steps."""

    step: int = 0
    named: float = 0.0
    wrong: float = 1.0
    tower_done: bool = False


class Trainer:
    """The training loop with its state on disk.

    Args:
        model: new, or with weights to begin with.
        folder: of the run; a state in it is continued.
        steps: of the whole run.
        tower_steps: how many of them may go to the tower alone.
        threads: batches worked on at a time.
        pictures: in each of them.
        seed: of weights and data.
        teacher: what a new run starts from and its tower learns to see like.
    """

    def __init__(
        self,
        model: DemoModel,
        folder: Path,
        steps: int,
        tower_steps: int,
        threads: int,
        pictures: int,
        seed: int,
        teacher: Teacher | None = None,
    ) -> None:
        torch.set_num_threads(1)  # threads share a step, never an operator
        self.model, self.teacher = model, teacher
        self.path, self.steps, self.tower_steps, self.threads = folder / "state.pt", steps, tower_steps, threads
        self.pictures = pictures
        self.pool = ThreadPoolExecutor(threads)
        matrices, others = split_parameters(self.model)
        self.optimizers: list[torch.optim.Optimizer] = [
            *(Muon(matrices[part::threads], lr=MUON_FACTOR * PEAK_RATE) for part in range(threads)),
            torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.05),
        ]
        self.progress = Progress()
        self.maker = BatchMaker(tokenizer.build(model.design), model.design)
        if self.path.exists():
            self._load()
        elif teacher:
            teacher.start(model)
        self.rng = np.random.default_rng([seed, self.progress.step])  # a continued run sees new pictures
        print(f"{sum(p.numel() for p in self.model.parameters()):,} parameters, {self.progress}", flush=True)

    def run(self, seconds: float) -> None:
        """Trains until all steps are done or the time is up, saving as it goes."""
        begin = logged = saved = time.monotonic()
        means: dict[str, float] = {}
        while self.progress.step < self.steps and time.monotonic() - begin < seconds:
            for name, value in self._update().items():
                means[name] = 0.95 * means.get(name, value) + 0.05 * value
            now = time.monotonic()
            if now - logged > LOG_SECONDS:
                logged = now
                text = " ".join(f"{name} {value:.3f}" for name, value in means.items())
                print(f"{(now - begin) / 60:6.1f} min step {self.progress.step} {text}", flush=True)
            if now - saved > SAVE_SECONDS:
                saved = now
                self._save()
        self._save()

    def _rate(self) -> float:
        step = self.progress.step
        falling = FINAL_RATE + (PEAK_RATE - FINAL_RATE) * max(1 - step / self.steps, 0)
        return falling * min(1.0, (step + 1) / WARM_UP)

    def _update(self) -> dict[str, float]:
        """One step: every thread takes a batch, gradients add up, then the optimizers move."""
        progress = self.progress
        progress.tower_done |= progress.step >= self.tower_steps or progress.named > TOWER_GOAL
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate() * (MUON_FACTOR if isinstance(optimizer, Muon) else 1.0)
            optimizer.zero_grad()
        alone = REHEARSALS if progress.tower_done else TAUGHT if self.teacher else 1.0
        whole = self.rng.random() >= alone
        learn = self._learn_answers if whole else self._learn_tower
        parts = list(self.pool.map(learn, self.rng.spawn(self.threads)))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        values = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        progress.step += 1
        progress.named += 0.02 * (values.get("named", progress.named) - progress.named)
        progress.wrong += 0.02 * (values.get("wrong", progress.wrong) - progress.wrong)
        return values

    def _backward(self, loss: torch.Tensor) -> None:
        (loss / self.threads).backward()  # type: ignore[no-untyped-call]

    def _learn_tower(self, rng: np.random.Generator) -> dict[str, float]:
        if self.progress.tower_done:
            drawn = draw_pictures(rng, self.pictures, "train", crowding=REHEARSED_CROWDING, digits=REHEARSED_DIGITS)
        else:
            drawn = draw_pictures(rng, self.pictures, "train", crowding=CROWDING)
        pictures = self._packed(drawn)
        embeddings = self.model.embed(pictures)
        loss, named = self.model.auxiliary_loss(embeddings, pictures)
        values = {"auxiliary": loss.item(), "named": named}
        if self.teacher:
            wanted = self.teacher.embeddings(drawn, pictures.merged)
            distance = F.mse_loss(embeddings, wanted) / wanted.var()
            values["distance"] = distance.item()
            loss = loss + distance
        self._backward(loss)
        return values

    def _packed(self, drawn: list[tuple[Image.Image, Scene]]) -> Pictures:
        return Pictures.of(drawn, self.model.design.preprocess)

    def _learn_answers(self, rng: np.random.Generator) -> dict[str, float]:
        drawn = draw_pictures(rng, self.pictures, "train", self._limit(rng), CROWDING)
        pictures = self._packed(drawn)
        blind = self.teacher is not None and not self.progress.tower_done
        if self.teacher is not None and blind:
            embeddings = self.teacher.embeddings(drawn, pictures.merged)
        else:
            embeddings = self.model.embed(pictures)
        auxiliary, named = self.model.auxiliary_loss(embeddings, pictures)
        pictures, embeddings = pictures.mirrored(rng, embeddings)
        logits, tokens, place = self.model.answer(embeddings, pictures, self._ask(rng, pictures))
        answer = F.cross_entropy(logits, tokens)
        weight = AUXILIARY_WEIGHTS[self.progress.named > WELL_NAMED]
        self._backward(answer + weight * auxiliary + PLACE_WEIGHT * place)
        wrong = (logits.argmax(-1) != tokens).float().mean().item()
        losses = {"place": place.item(), "answer": answer.item(), "wrong": wrong}
        return losses | ({"auxiliary": auxiliary.item(), "named": named} if not blind else {})

    def _limit(self, rng: np.random.Generator) -> int:
        """The curriculum: up to 2 × 2 cells until those are told well, then up to 3 × 3, with some easy ones."""
        most = 2 if self.progress.wrong > READY else 3
        return int(rng.integers(1, most + 1)) if rng.random() < 0.15 else most

    def _ask(self, rng: np.random.Generator, pictures: Pictures) -> Batch:
        choice = rng.random()
        if choice < PAIRS:
            pairs = zip(pictures.scenes[::2], pictures.scenes[1::2], strict=True)
            asked = [[questions.which(rng, *pair) for _ in range(PAIR_QUESTIONS)] for pair in pairs]
            return self.maker.shared_prefix(pictures, 2, asked)
        asked = [drill(rng, scene) for scene in pictures.scenes]
        if choice < PAIRS + QUESTION_FIRST:
            return self.maker.text_first(pictures, [some[rng.integers(len(some))] for some in asked])
        if choice < PAIRS + QUESTION_FIRST + CONVERSATIONS:
            shuffled = [[some[i] for i in rng.permutation(len(some))] for some in asked]
            return self.maker.turns(pictures, shuffled)
        return self.maker.shared_prefix(pictures, 1, asked)

    def _load(self) -> None:
        state = torch.load(self.path, weights_only=True)
        changed = self.model.load_state_dict(state["model"], strict=False)
        # with a head added since, or another number of threads, the optimizers start afresh
        if not changed.missing_keys and len(state["optimizers"]) == len(self.optimizers):
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        self.progress = Progress(**state.get("progress", {"step": state["step"], "tower_done": True}))

    def _save(self) -> None:
        """Writes the state in one piece, then says how well held-out pictures are answered."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "design": self.model.design.name,
            "step": self.progress.step,
            "progress": asdict(self.progress),
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self.path)
        if self.progress.tower_done or self.teacher:
            figures = exact_answers(self.model, self.maker, CHECK_PICTURES, seed=self.progress.step)
            print("held out: " + " ".join(f"{kind} {value:.3f}" for kind, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
