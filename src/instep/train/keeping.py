"""Outputs kept batch by batch, and put together in dataset order in the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from instep.errors import TrainError
from instep.train.gathering import gather
from instep.train.trees import (
    build,
    columns,
    decided,
    describe,
    join,
    leaf_specs,
    on_cpu,
    rows_of,
    take,
    unify,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from instep.train.failures import Caught
    from instep.train.gathering import Dealing
    from instep.train.trees import Column, Spec


@dataclass(frozen=True)
class Word:
    """What one rank has kept.

    Attributes:
        rows: of each batch, how many.
        specs: what columns there are, where outputs are stored.
        one_each: each sample has one row.

    """

    rows: list[int]
    specs: dict[str, Spec]
    one_each: bool


class Kept:
    """The outputs of one rank.

    Args:
        dealing: how the loader deals out what there is.
        whole: it deals out ready batches: only those can be put in order, not the samples in them.
        store: keep the outputs; otherwise only how many rows they have.
        strict: each sample has to have exactly one row.

    Attributes:
        batches: how many were added.

    """

    def __init__(self, dealing: Dealing, *, whole: bool, store: bool = True, strict: bool = False) -> None:
        self.dealing = dealing
        self.whole = whole
        self.store = store
        self.strict = strict
        self.batches = 0
        self._trees: list[dict[str, Any]] = []
        self._rows: list[int] = []
        self._specs: dict[str, Spec] = {}
        self._one_each = True

    def add(self, trees: dict[str, Any], size: int | None) -> None:
        """Keep a batch.

        Args:
            trees: outputs by what they are called in errors.
            size: number of samples; None where that is unknown.

        Raises:
            TrainError: the trees do not have the same number of rows.

        """
        self.batches += 1
        found = [rows_of(tree, size) for tree in trees.values() if tree is not None]
        rows = size if size in found else next((number for number in found if number is not None), None)
        rows = 1 if rows is None else rows
        self._rows.append(rows)
        self._one_each = self._one_each and rows == (rows if size is None else size)
        if not self.store:
            return
        if self.strict and not self.whole and not self._one_each:
            raise TrainError(
                "Which output belongs to which sample?",
                evidence=[f"batch {self.batches - 1} of this rank has {size} samples, and {rows} outputs"],
                cure="Let forward give one row (or, in a list, one item) for each sample.",
            )
        kept = {name: on_cpu(tree) for name, tree in trees.items()}
        for name, tree in kept.items():
            spec = describe(tree, rows, name)
            self._specs[name] = unify([self._specs.get(name, spec), spec], name)
        self._trees.append(kept)

    def word(self) -> Word:
        """What the other ranks have to know of this one."""
        return Word(self._rows, self._specs, one_each=self._one_each and not self.whole)

    def order(self, words: Sequence[Word]) -> Tensor | None:
        """What puts the rows of all ranks, one rank below the other, in dataset order; None: they are.

        Args:
            words: of all ranks.

        """
        single = all(word.one_each for word in words if word.rows)
        # Where samples do not have one row each, whole batches are put in the order in which they were dealt.
        units = [[1] * sum(word.rows) if single else word.rows for word in words]
        dealing = self.dealing if single or self.whole else self.dealing.of_batches()
        return dealing.order(units)

    def gather(self, words: Sequence[Word], *, to: int | None, caught: Caught[Any]) -> dict[str, Any] | None:
        """The outputs of all samples, in dataset order. All ranks call it, and at least one has a batch.

        Args:
            words: of all ranks.
            to: the rank that gets them; None: every rank.
            caught: tells the others of a failure.

        Returns:
            None on a rank that does not get them.

        """
        found = [word.specs for word in words if word.specs]
        specs = {name: decided(unify([one[name] for one in found], name)) for name in found[0]}
        kinds = [leaf for spec in specs.values() for leaf in leaf_specs(spec)]
        mine: list[Column] = []
        with caught:
            pieces = [self._columns(number, specs) for number in range(len(self._trees))]
            self._trees.clear()  # all of it is in the pieces now
            mine = [join([piece[place] for piece in pieces], kind) for place, kind in enumerate(kinds)]
        gathered = gather(mine, kinds, to, caught)
        if gathered is None:
            return None
        order = self.order(words)
        filled = iter([take(column, order) for column in gathered])
        return {name: build(spec, filled) for name, spec in specs.items()}

    def _columns(self, number: int, specs: dict[str, Spec]) -> list[Column]:
        trees, rows = self._trees[number], self._rows[number]
        return [column for name, spec in specs.items() for column in columns(trees[name], spec, rows)]
