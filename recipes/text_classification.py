"""Tell which part of Python's standard library a docstring belongs to: a small transformer over words.

    instep run --nproc 2 recipes/text_classification.py --checkpoints checkpoints/text
    python recipes/text_classification.py

The corpus is one that you have: the docstrings of nine packages of the Python that runs this, some 1700 texts, read
from their source files (nothing is imported). A package's name is no label in its texts, but a text may well say
"socket" or "log". No text is there twice, so none of the test was seen in training; always guessing the most frequent
package would be right 17 % of the time.

What it shows: batches that are dicts, padding by a collate function, early stop, the best checkpoint by accuracy, and
a test with its weights. Started again with the same --checkpoints it goes on where it was stopped. How much padding a
batch has depends on the texts in it, and so on the number of ranks; attention and mean leave it out, and every number
of ranks gives the same figures. Needs: pip install 'instep[torch]'
"""

from __future__ import annotations

import argparse
import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import instep

PACKAGES = ["asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml"]
PADDING, UNKNOWN = 0, 1

# ---------------------------------------------------------------------------------------------------------------
# The data


def docstrings(package: str) -> list[str]:
    """The docstrings of a package of the standard library, in the order of its files."""
    found = []
    files = sorted(Path(sysconfig.get_path("stdlib"), package).rglob("*.py"))
    for file in (one for one in files if "test" not in one.parts):  # which some versions of Python have there
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found += [ast.get_docstring(node) or ""]
    return found


def load_texts() -> list[tuple[list[str], int]]:
    """(words, number of the package) of each docstring of at least six words; none of them twice, shuffled."""
    texts: dict[tuple[str, ...], int] = {}
    for label, package in enumerate(PACKAGES):
        for text in docstrings(package):
            words = tuple(re.findall(r"[a-z]+", text.lower()))
            if len(words) >= 6:
                texts.setdefault(words, label)
    found = [(list(words), label) for words, label in texts.items()]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[at] for at in order.tolist()]


class Texts(Dataset[dict[str, Any]]):
    """Texts as lists of word numbers; a word that is not in the vocabulary is UNKNOWN."""

    def __init__(self, texts: list[tuple[list[str], int]], vocabulary: dict[str, int], longest: int) -> None:
        self.items = [
            {"words": [vocabulary.get(word, UNKNOWN) for word in words[:longest]], "package": label}
            for words, label in texts
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def pad(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch: words [N, longest of them], how many each text has [N], and its package [N]."""
    words = [torch.tensor(sample["words"]) for sample in samples]
    return {
        "words": nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=PADDING),
        "lengths": torch.tensor([len(one) for one in words]),
        "package": torch.tensor([sample["package"] for sample in samples]),
    }


def load_data(longest: int) -> tuple[Texts, Texts, Texts, int]:
    """70 % to learn from, 15 % to choose by, 15 % for the test; and the number of words that are known."""
    texts = load_texts()
    first, second = int(0.7 * len(texts)), int(0.85 * len(texts))
    counts = Counter(word for words, _ in texts[:first] for word in words)  # of what is learned from, and no more
    known = sorted(word for word, count in counts.items() if count > 1)
    vocabulary = {word: number for number, word in enumerate(known, start=UNKNOWN + 1)}
    parts = (texts[:first], texts[first:second], texts[second:])
    train, choose, test = (Texts(part, vocabulary, longest) for part in parts)
    return train, choose, test, len(vocabulary) + 2


# ---------------------------------------------------------------------------------------------------------------
# The model


class Classifier(nn.Module):
    """Embeds words and their places, lets them look at each other once, and takes the mean.

    On so few texts the mean of the words alone is as good; the layer in between is there to be replaced.
    """

    def __init__(self, vocabulary: int, longest: int, width: int = 64) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        self.place = nn.Embedding(longest, width)
        self.layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.out = nn.Linear(width, len(PACKAGES))
        for table in (self.word, self.place):
            nn.init.normal_(table.weight, std=0.1)  # torch's 1 drowns what so few texts can teach: 68 % right, not 80

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Words [N, L] and lengths [N] -> [N, packages]. The names say which fields of a batch it gets."""
        places = torch.arange(words.shape[1], device=words.device)
        is_padding = places >= lengths.unsqueeze(1)
        x = self.layer(self.word(words) + self.place(places), src_key_padding_mask=is_padding)
        x = x.masked_fill(is_padding.unsqueeze(-1), 0.0).sum(dim=1) / lengths.unsqueeze(1)
        scores: Tensor = self.out(x)
        return scores


# ---------------------------------------------------------------------------------------------------------------
# The program


def main() -> None:
    instep.world()  # takes away the argument that torch.distributed.launch adds to ours
    parser = argparse.ArgumentParser(description="Tell which part of the standard library a docstring belongs to.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="end after so many steps")
    parser.add_argument("--global-batch", type=int, default=64, help="texts per step, all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--longest", type=int, default=48, help="words that are read of a text")
    parser.add_argument("--patience", type=int, default=3, help="evaluations without a better accuracy until it ends")
    parser.add_argument("--workers", type=int, default=0, help="data loader processes of each rank")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", default=Path("checkpoints/text"))
    parser.add_argument("--max-time", metavar="H:MM:SS", help="save and end with exit code 75 after so long")
    args = parser.parse_args()

    with instep.init() as session:
        train, choose, test, vocabulary = load_data(args.longest)
        trainer = instep.Trainer(
            lambda: Classifier(vocabulary, args.longest),
            lambda parameters: torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.05),
            train,
            loss=cross_entropy,
            target="package",
            eval_data=choose,
            metrics={"accuracy": instep.train.Accuracy()},
            monitor="accuracy",
            global_batch=args.global_batch,
            eval_batch_size=128,
            loader_options={"collate_fn": pad, "num_workers": args.workers},
            epochs=args.epochs,
            schedule="cosine",
            warmup=10,
            clip_norm=1.0,
            callbacks=[instep.train.EarlyStop("accuracy", larger_is_better=True, patience=args.patience)],
            max_time=args.max_time,
            checkpoint=args.checkpoints,
            steps=args.steps,
            resume="auto",
        )
        trainer.fit()
        trainer.load("best")
        results = trainer.evaluate(test)
        if session.is_main:
            accuracy = results["accuracy"]
            print(f"test accuracy {accuracy:.2%} ({round(accuracy * len(test))} of {len(test)} texts)")


if __name__ == "__main__":
    main()
