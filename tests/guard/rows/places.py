"""Ranks that make other calls than the others, make them elsewhere, or through a library."""

from __future__ import annotations

from tests.guard.rows import Row

ROWS = [
    # Same number, other content
    Row("shape", "mismatch", (1,), """
        rows = 20 if dist.get_rank() == 1 else 10
        dist.barrier()
        dist.all_reduce(torch.ones(rows))  # <- HERE
        """),
    Row("shape in a loop", "mismatch", (1,), """
        def main():
            rank = dist.get_rank()
            for step in range(5):
                rows = 20 if rank == 1 and step == 3 else 10
                dist.all_reduce(torch.ones(rows))  # <- HERE
        main()
        """),
    Row("dtype", "mismatch", (2,), """
        dist.barrier()
        dist.broadcast(torch.ones(4, dtype="Long" if dist.get_rank() == 2 else "Float"))  # <- HERE
        dist.barrier()
        """),
    Row("order of two lines", "mismatch", (1,), """
        rank = dist.get_rank()
        dist.barrier()
        if rank != 1:  # <- HERE
            dist.all_reduce(torch.ones(3))
            dist.all_gather([], torch.ones(4))
        else:
            dist.all_gather([], torch.ones(4))
            dist.all_reduce(torch.ones(3))
        """),
    Row("metric keys", "mismatch", (2,), """
        names = ["confusion", "loss"] if dist.get_rank() == 2 else ["loss", "confusion"]
        for name in names:
            value = torch.ones(1 if name == "loss" else 9)
            dist.all_reduce(value)  # <- HERE
        """),
    Row("groups in another order", "cycle", (2,), """
        rank = dist.get_rank()
        model, data = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])
        dist.barrier()
        if rank == 2:  # <- HERE
            dist.all_reduce(torch.ones(2), group=data)
            dist.all_reduce(torch.ones(2), group=model)
        else:
            dist.all_reduce(torch.ones(2), group=model)
            dist.all_reduce(torch.ones(2), group=data)
        """, 4),
    Row("a ring of pairs", "cycle", (0, 1, 2), """
        rank = dist.get_rank()
        pairs = [dist.new_group([left, (left + 1) % 3]) for left in range(3)]
        dist.barrier()
        for offset in (0, -1):
            dist.all_reduce(torch.ones(2), group=pairs[(rank + offset) % 3])  # <- HERE
        """),
    Row("both send first", "cycle", (0, 1), """
        peer = 1 - dist.get_rank()
        dist.barrier()
        dist.send(torch.ones(5), peer)  # <- HERE
        dist.recv(torch.ones(5), peer)
        """, 2),
    Row("a collective against a message", "cycle", (0,), """
        rank = dist.get_rank()
        dist.barrier()
        if rank == 0:  # <- HERE
            dist.recv(torch.ones(5), src=1)
        dist.all_reduce(torch.ones(2))
        """),
    Row("one in another group", "cycle|missing", (1,), """
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        dist.barrier()
        if rank == 1:  # <- HERE
            dist.all_reduce(torch.ones(2), group=group)
        dist.all_gather([], torch.ones(2))
        """),
    # Elsewhere
    Row("a queue", "blocked", (2,), """
        batches = queue.Queue()
        def next_batch():
            return batches.get()  # <- HERE
        rank = dist.get_rank()
        dist.barrier()
        if rank == 2:
            next_batch()
        dist.all_reduce(torch.ones(2))
        """),
    Row("a lock", "blocked", (0,), """
        lock = threading.Lock()
        def report():
            with lock:  # <- HERE
                return 1
        dist.barrier()
        if dist.get_rank() == 0:
            lock.acquire()
            report()
        dist.all_reduce(torch.ones(2))
        """),
    Row("a lock file", "blocked", (1,), """
        locked = True
        dist.barrier()
        def take():
            while locked:
                time.sleep(0.1)  # <- HERE
        if dist.get_rank() == 1:
            take()
        dist.all_reduce(torch.ones(2))
        """),
    Row("asleep past the loop", "missing", (1,), """
        rank = dist.get_rank()
        for step in range(4 if rank == 1 else 6):  # <- HERE
            dist.backward()
        time.sleep(1000)
        """),
    Row("asleep where no way leads back", "missing", (1,), """
        def main():
            rank = dist.get_rank()
            dist.backward()
            if rank == 1:  # <- HERE
                time.sleep(1000)
            else:
                dist.barrier()
        main()
        """),
    Row("a failure of its own", "dead", (1,), """
        def main():
            for step in range(4):
                dist.backward()
                if dist.get_rank() == 1 and step == 2:
                    raise ValueError("bad sample")  # <- HERE
        main()
        """),
    # Through libraries
    Row("a callback of one rank", "mismatch", (1,), """
        class Log:
            def on_step_end(self, module, index):
                if dist.get_rank() == 1 and index == 2:  # <- HERE
                    dist.all_reduce(torch.ones(1))
        class Module:
            def training_step(self, batch, index):
                dist.backward()
            def on_end(self):
                pass
        fit(Module(), range(4), [Log()])
        """),
    Row("a training step that skips", "mismatch", (1,), """
        class Module:
            def training_step(self, batch, index):
                loss = torch.scalar(float("nan") if dist.get_rank() == 1 and index == 2 else 1.0)
                if not torch.isfinite(loss):  # <- HERE
                    return None
                dist.backward()
                return loss
            def on_end(self):
                dist.barrier()
        fit(Module(), range(4))
        """),
    Row("at the end, main only", "extra|mismatch", (0,), """
        class Module:
            def training_step(self, batch, index):
                dist.backward()
            def on_end(self):
                if dist.get_rank() == 0:  # <- HERE
                    dist.barrier()
        fit(Module(), range(4))
        """),
    Row("a comprehension", "mismatch", (1,), """
        rank = dist.get_rank()
        def total(x):
            dist.all_reduce(torch.ones(2))
            return x
        parts = [1, 2] if rank != 1 else [1]
        dist.barrier()
        out = [total(x) for x in parts]  # <- HERE
        dist.barrier()
        """),
    Row("a lambda", "mismatch", (0,), """
        log = lambda x: dist.all_reduce(x) if dist.get_rank() == 0 else None  # <- HERE
        dist.barrier()
        log(torch.ones(2))
        dist.barrier()
        """),
    Row("recursion", "mismatch", (1,), """
        rank = dist.get_rank()
        def walk(depth):
            dist.all_reduce(torch.ones(2))
            if depth < (2 if rank == 1 else 4):  # <- HERE
                walk(depth + 1)
        walk(0)
        dist.barrier()
        """),
    Row("finally", "mismatch", (1,), """
        def work(rank):
            try:
                if rank == 1:  # <- HERE
                    return
                dist.all_reduce(torch.ones(4))
            finally:
                dist.barrier()
        dist.all_gather([], torch.ones(3))
        work(dist.get_rank())
        """),
    Row("a with statement", "mismatch", (2,), """
        from contextlib import nullcontext
        def main():
            rank = dist.get_rank()
            for step in range(4):
                boundary = step % 2 == 1 and rank != 2
                with nullcontext():
                    forward = 1
                    if boundary:  # <- HERE
                        dist.backward()
                dist.all_reduce(torch.ones(1))
        main()
        """),
    Row("for else", "mismatch", (1,), """
        def main():
            rank = dist.get_rank()
            dist.barrier()
            for candidate in range(4):
                if candidate == (2 if rank == 1 else 9):  # <- HERE
                    break
            else:
                dist.all_reduce(torch.ones(2))
            dist.barrier()
        main()
        """),
    Row("a file that only some have", "mismatch|missing", (1,), """
        import os
        def resume(rank):
            found = rank != 1
            if found:  # <- HERE
                dist.broadcast(torch.ones(30))
            return found
        dist.barrier()
        resume(dist.get_rank())
        dist.all_reduce(torch.ones(1))
        """),
    Row("nothing to do, and home", "missing", (1,), """
        def files_of(rank):
            return [] if rank == 1 else list(range(20))
        def main():
            for _ in range(4):
                dist.all_reduce(torch.ones(4))
            files = files_of(dist.get_rank())
            if not files:  # <- HERE
                note = "nothing to do"
                return
            for _ in files:
                dist.all_reduce(torch.ones(4))
        main()
        """),
    Row("a helper ends the process", "missing", (2,), """
        import sys
        def check(budget):
            if budget <= 0:  # <- HERE
                sys.exit(0)
        def main():
            budget = 3 if dist.get_rank() == 2 else 30
            for _ in range(10):
                check(budget)
                dist.all_reduce(torch.ones(3))
                budget -= 1
        if __name__ == "__main__":
            main()
        """),
    Row("an error on its way out", "mismatch", (2,), """
        def check(loss):
            if loss > 10:
                raise ArithmeticError("the loss explodes")  # <- HERE
        def epoch(rank):
            try:
                for step in range(10):
                    check(99 if rank == 2 and step == 4 else 1)
                    dist.all_reduce(torch.ones(1))
            finally:
                dist.barrier()
        epoch(dist.get_rank())
        """),
    Row("an optimizer that calls back", "mismatch", (1,), """
        def main(rank):
            def closure():
                dist.all_reduce(torch.ones(9))
            for epoch in range(4):
                minimize(closure, 2 if rank == 1 and epoch == 2 else 4)  # <- HERE
                dist.broadcast(torch.ones(3))
        main(dist.get_rank())
        """),
    Row("a tree", "mismatch", (1,), """
        class Node:
            def __init__(self, depth):
                self.value = torch.ones(depth + 1)
                self.children = [Node(depth - 1) for _ in range(2)] if depth else []
        def reduce(node):
            dist.all_reduce(node.value)
            if not node.children:  # <- HERE
                return 1
            return 1 + sum(reduce(child) for child in node.children)
        def main():
            tree = Node(3)
            if dist.get_rank() == 1:
                tree.children[0].children[1].children = []
            reduce(tree)
            dist.barrier()
        main()
        """),
    Row("the group of others", "cycle", (2,), """
        def main():
            rank = dist.get_rank()
            groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            for _ in range(4):
                dist.all_reduce(torch.ones(4), group=groups[rank // 2])
            group = groups[rank // 3]
            dist.all_reduce(torch.ones(16), group=group)  # <- HERE
            dist.barrier()
        main()
        """, 4),
    Row("a key that nobody sets", "blocked", (1,), """
        def lookup(name):
            return store.get(name)  # <- HERE
        for _ in range(4):
            dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            lookup("x")
        dist.all_reduce(torch.ones(4))
        """),
    Row("a context manager that swallows", "mismatch", (1,), {"train.py": """
        from safety import ignore_errors
        def main():
            rank = dist.get_rank()
            for step in range(5):
                with ignore_errors():  # <- HERE
                    x = {0: 1}[1 if rank == 1 and step == 2 else 0]
                    dist.backward()
                dist.broadcast(torch.ones(3))
        main()
        """, "safety.py": """
        from contextlib import contextmanager
        @contextmanager
        def ignore_errors():
            try:
                yield
            except Exception:
                pass
        """}),
    Row("an iterator by hand", "mismatch", (1,), """
        def main():
            batches = iter([1] * (3 if dist.get_rank() == 1 else 5))
            while True:
                try:
                    batch = next(batches)
                except StopIteration:  # <- HERE
                    break
                dist.backward()
            dist.barrier()
        main()
        """),
    Row("next with a default", "mismatch", (1,), """
        def main():
            batches = iter([1] * (3 if dist.get_rank() == 1 else 5))
            while (batch := next(batches, None)) is not None:  # <- HERE
                dist.backward()
            dist.barrier()
        main()
        """),
    Row("none comes back", "missing", (2,), """
        class Data:
            def load(self, rank, step):
                return None if rank == 2 and step == 3 else 1
        data = Data()
        def main(rank):
            for step in range(6):
                sample = data.load(rank, step)
                if sample is None:  # <- HERE
                    note = "skipped"
                    continue
                dist.backward()
                dist.all_reduce(torch.ones(2))
        main(dist.get_rank())
        """),
    Row("two skips", "mismatch", (0,), """
        rank = dist.get_rank()
        for step in range(8):
            loss = torch.scalar(float("nan") if rank == 0 and step in (2, 4) else 0.5)
            if not torch.isfinite(loss):  # <- HERE
                continue
            dist.backward()
        dist.barrier()
        """),
    Row("two ranks: a skipped step", "mismatch", (1,), """
        rank = dist.get_rank()
        for step in range(8):
            loss = torch.scalar(float("nan") if rank == 1 and step == 2 else 0.5)
            if not torch.isfinite(loss):  # <- HERE
                continue
            dist.backward()
        dist.barrier()
        """, 2),
    Row("two ranks: one has fewer batches", "missing", (1,), """
        rank = dist.get_rank()
        for step in range(4 if rank else 6):  # <- HERE
            dist.backward()
        """, 2),
    Row("two ranks: a swallowed error", "mismatch", (1,), """
        rank = dist.get_rank()
        for step in range(5):
            try:
                x = {0: 1}[1 if rank == 1 and step == 2 else 0]
                dist.backward()
            except KeyError:  # <- HERE
                pass
            dist.all_reduce(torch.ones(7))
        """, 2),
    Row("two ranks: both in a branch of their own", "mismatch", (0, 1), """
        local = [3, 30][dist.get_rank()]
        dist.barrier()
        if local > 10:  # <- HERE
            dist.all_reduce(torch.ones(7))
        else:
            dist.all_gather([], torch.ones(7))
        """, 2),
    Row("an expert without tokens, unlike sizes", "mismatch", (1,), """
        class Experts:
            def forward(self, tokens, choice):
                for number in "abc":
                    mine = [one for one in choice if one == number]
                    if len(mine) == 0:  # <- HERE
                        continue
                    out = torch.ones(10 + "abc".index(number))
                    dist.all_reduce(out)
        def main():
            layer = Experts()
            for step in range(5):
                choice = "aaac" if step == 3 and dist.get_rank() == 1 else "aabbc"
                layer.forward(1, choice)
                dist.barrier()
        main()
        """),
    Row("now and then, on main", "mismatch", (0,), """
        class Experiment:
            def step(self):
                dist.backward()
            def checkpoint(self):
                if dist.get_rank() == 0:  # <- HERE
                    dist.barrier()
        def main():
            experiment = Experiment()
            for step in range(1, 20):
                experiment.step()
                if step % 5 == 0:
                    experiment.checkpoint()
        main()
        """),
    Row("a trainer that ends earlier", "missing", (1,), """
        class Module:
            def training_step(self, batch, index):
                dist.backward()
            def on_end(self):
                pass
        fit(Module(), range(3 if dist.get_rank() == 1 else 5))  # <- HERE
        """),
    Row("a message too many", "cycle", (2,), """
        def pass_on(rank, x, micro):
            if rank > 0:
                dist.recv(x, rank - 1)
            if rank < 2:
                dist.send(x, rank + 1)
        def main():
            rank = dist.get_rank()
            for step in range(6):
                micros = 3 if rank != 2 or step < 4 else 4
                for micro in range(micros):  # <- HERE
                    pass_on(rank, torch.ones(10), micro)
                dist.all_reduce(torch.ones(10))
        main()
        """),
]  # fmt: skip
