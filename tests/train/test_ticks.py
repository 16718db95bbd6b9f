"""What the ranks tell each other between two steps, in words short and long."""

from __future__ import annotations

from tests.harness import run_ranks


def test_words_of_any_length_come_whole() -> None:
    def told() -> list[list[str | None]]:
        from instep import rank
        from instep.train.ticks import Ticks, Word

        ticks, words = Ticks(log_every=50), []
        for length in (1, 1000, 1024, 5000):  # of rank 1; the others are brief
            heard = ticks.exchange(Word("x" * length if rank() == 1 else f"rank {rank()}"), step=1)
            words.append([word.stop for word in heard.words])
        return words

    for words in run_ranks(told, 3):
        assert words == [["rank 0", "x" * length, "rank 2"] for length in (1, 1000, 1024, 5000)]
