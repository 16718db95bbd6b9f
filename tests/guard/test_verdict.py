"""Programs in which ranks fall out of step, of each kind and in many shapes: the kind, the ranks and the line named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from instep.guard.verdict import judge
from tests.guard.building import World

if TYPE_CHECKING:
    from pathlib import Path

    from instep.guard.verdicts import Verdict


@dataclass(frozen=True)
class Row:
    name: str
    kinds: str
    ranks: tuple[int, ...]
    source: str | dict[str, str]
    nproc: int = 3


ROWS = [
    # Not everyone calls
    Row("barrier for some", "missing", (2,), """
        rank = dist.get_rank()
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        if rank != 2:  # <- HERE
            dist.barrier()
        dist.barrier()
        """),
    Row("barrier for some, in a function", "missing", (3,), """
        def save(rank):
            if rank != 3:  # <- HERE
                write = True
                dist.barrier()

        def main():
            rank = dist.get_rank()
            dist.all_reduce(torch.ones(4))
            save(rank)
            dist.barrier()
        main()
        """, 4),
    Row("barrier inside the main rank's branch", "mismatch", (0,), """
        rank = dist.get_rank()
        for step in range(5):
            dist.all_reduce(torch.ones(4))
            if rank == 0 and step == 3:  # <- HERE
                prepare = 1
                dist.barrier()
        """),
    Row("two ranks: barrier inside the main rank's branch", "mismatch", (0,), """
        def main():
            dist.all_reduce(torch.ones(4))
            if dist.get_rank() == 0:  # <- HERE
                dist.barrier()
            dist.all_reduce(torch.ones(4))
        main()
        """, 2),
    Row("two ranks: all but main", "mismatch", (0,), """
        def main():
            dist.all_reduce(torch.ones(4))
            if dist.get_rank() != 0:  # <- HERE
                dist.barrier()
            dist.all_reduce(torch.ones(4))
        main()
        """, 2),
    Row("early return for the others", "mismatch", (0,), {"train.py": """
        import saving
        def main():
            rank = dist.get_rank()
            for step in range(3):
                dist.all_reduce(torch.ones(8))
                saving.save(rank, step)
        main()
        """, "saving.py": """
        def save(rank, step):
            if step != 1:
                return
            if rank != 0:  # <- HERE
                return
            state = gather_state(rank)

        def gather_state(rank):
            parts = [None]
            dist.all_gather(parts, torch.ones(3))
            return parts
        """}),
    Row("one line", "mismatch", (0,), """
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(4))
        if rank == 0: dist.barrier()  # <- HERE
        dist.all_reduce(torch.ones(4))
        """),
    Row("and", "mismatch", (0,), """
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(4))
        rank == 0 and dist.barrier()  # <- HERE
        dist.all_reduce(torch.ones(4))
        """),
    Row("ternary", "mismatch", (1,), """
        rank = dist.get_rank()
        def total(x):
            dist.all_reduce(x)
            return x
        dist.barrier()
        x = torch.ones(4)
        y = x if rank == 1 else total(x)  # <- HERE
        dist.barrier()
        """),
    Row("ternary over lines", "mismatch", (1,), """
        rank = dist.get_rank()
        def total(x):
            dist.all_reduce(x)
            return x
        dist.barrier()
        x = torch.ones(4)
        y = (
            x
            if rank == 1  # <- HERE
            else total(x)
        )
        dist.barrier()
        """),
    Row("match", "mismatch", (2,), """
        def main(rank):
            mode = "eval" if rank == 2 else "train"
            dist.barrier()
            match mode:  # <- HERE
                case "train":
                    dist.all_reduce(torch.ones(4))
                case "eval":
                    dist.all_gather([], torch.ones(4))
        main(dist.get_rank())
        """),
    Row("elif", "mismatch", (1,), """
        def main(rank):
            size = [10, 0, 10][rank]
            dist.barrier()
            if size > 100:
                dist.all_gather([], torch.ones(4))
            elif size > 5:  # <- HERE
                dist.all_reduce(torch.ones(4))
            else:
                dist.broadcast(torch.ones(2))
            dist.barrier()
        main(dist.get_rank())
        """),
    Row("evaluation through the wrapper on main", "mismatch", (0,), """
        class Wrapper:
            def forward(self, x):
                dist.broadcast(torch.ones(7))
                return x
        model = Wrapper()
        def evaluate(model):
            for batch in range(2):
                dist.call(model, batch)
        def main():
            for epoch in range(3):
                for step in range(2):
                    dist.call(model, step)
                    dist.backward()
                if dist.get_rank() == 0 and epoch == 1:  # <- HERE
                    evaluate(model)
                dist.barrier()
        main()
        """),
    Row("a collective state on main", "extra|mismatch", (0,), """
        class Sharded:
            def state_dict(self):
                out = []
                dist.all_gather(out, torch.ones(5))
                return out
        def main():
            model = Sharded()
            for step in range(2):
                dist.backward()
            if dist.get_rank() == 0:  # <- HERE
                state = model.state_dict()
        main()
        """),
    Row("main leaves, the others wait at the end", "missing", (0,), """
        def main():
            dist.all_reduce(torch.ones(4))
            if dist.get_rank() == 0:  # <- HERE
                return
            dist.barrier()
        main()
        """),
    Row("sys.exit", "missing", (1,), """
        import sys
        def main():
            dist.all_reduce(torch.ones(4))
            if dist.get_rank() == 1:  # <- HERE
                sys.exit(0)
            dist.barrier()
        main()
        """),
    Row("a decorator for the main rank", "mismatch", (0,), """
        import functools
        def main_only(function):
            @functools.wraps(function)
            def inner(*args):
                if dist.get_rank() == 0:  # <- HERE
                    return function(*args)
            return inner

        @main_only
        def report(x):
            dist.all_reduce(x)

        dist.barrier()
        report(torch.ones(3))
        dist.barrier()
        """),
    # Not the same number of times
    Row("uneven batches, range", "mismatch", (0,), """
        def loader(n):
            for i in range(n):
                yield torch.ones(2)
        def main():
            n = 3 if dist.get_rank() == 0 else 5
            for step, batch in enumerate(loader(n)):  # <- HERE
                dist.backward()
            dist.barrier()
        main()
        """),
    Row("uneven batches, no number", "mismatch", (0,), """
        class Data:
            def __init__(self, n): self.n = n
            def __iter__(self): return iter([torch.ones(2)] * self.n)
        loader = Data(3 if dist.get_rank() == 0 else 5)
        for batch in loader:  # <- HERE
            dist.backward()
        dist.barrier()
        """),
    Row("uneven batches, main leaves", "missing", (2,), """
        def train(batches):
            for index in range(batches):  # <- HERE
                dist.backward()
        train(4 if dist.get_rank() == 2 else 6)
        """),
    Row("uneven while", "mismatch", (1,), """
        def main():
            left = 4 if dist.get_rank() == 1 else 6
            while left > 0:  # <- HERE
                dist.backward()
                left -= 1
            dist.barrier()
        main()
        """),
    Row("early stop", "mismatch", (1,), """
        def main():
            rank = dist.get_rank()
            for epoch in range(9):
                dist.backward()
                accuracy = 0.9 if rank == 1 and epoch == 3 else 0.1
                if accuracy > 0.8:  # <- HERE
                    break
            dist.barrier()
        main()
        """),
    Row("early stop, object", "mismatch", (1,), {"train.py": """
        from stopping import Stopper
        def main():
            rank = dist.get_rank()
            stopper = Stopper()
            for epoch in range(9):
                dist.backward()
                if stopper.update(epoch if rank == 1 else -epoch):  # <- HERE
                    print_nothing = 1
                    break
            dist.barrier()
        main()
        """, "stopping.py": """
        class Stopper:
            best = 3
            def update(self, loss):
                return loss >= self.best
        """}),
    Row("early stop by return", "mismatch", (2,), """
        def fit(rank):
            for epoch in range(9):
                dist.backward()
                converged = rank == 2 and epoch == 3
                if converged:  # <- HERE
                    return epoch
        fit(dist.get_rank())
        dist.barrier()
        """),
    Row("nan skip, one line", "mismatch", (1,), """
        rank = dist.get_rank()
        for step in range(6):
            loss = torch.scalar(float("nan") if rank == 1 and step == 3 else 0.5)
            if not torch.isfinite(loss): continue  # <- HERE
            dist.backward()
        dist.all_reduce(torch.ones(4))
        """),
    Row("nan skip, the body under an if", "mismatch", (1,), """
        rank = dist.get_rank()
        for step in range(6):
            loss = torch.scalar(float("nan") if rank == 1 and step == 3 else 0.5)
            if torch.isfinite(loss):  # <- HERE
                scale = 1
                dist.backward()
            else:
                scale = 2
        dist.barrier()
        """),
    Row("nan skip, by return in a callee", "mismatch", (1,), {"train.py": """
        import step as steps
        rank = dist.get_rank()
        for index in range(6):
            steps.train_step(torch.scalar(float("nan") if rank == 1 and index == 3 else 0.5))
        dist.barrier()
        """, "step.py": """
        def train_step(loss):
            if not torch.isfinite(loss):  # <- HERE
                return None
            dist.backward()
            return loss
        """}),
    Row("nan skip, by raise in a callee", "mismatch", (1,), {"train.py": """
        import step as steps
        rank = dist.get_rank()
        for index in range(6):
            try:
                steps.train_step(torch.scalar(float("nan") if rank == 1 and index == 3 else 0.5))
            except FloatingPointError:  # <- HERE
                continue
        dist.barrier()
        """, "step.py": """
        def train_step(loss):
            if not torch.isfinite(loss):
                raise FloatingPointError(loss.item())
            dist.backward()
            return loss
        """}),
    Row("nan skip, two ops a step", "mismatch|missing", (1,), """
        class Trainer:
            def __init__(self):
                self.rank = dist.get_rank()
            def loss(self, step):
                return torch.scalar(float("nan") if self.rank == 1 and step == 3 else 0.5)
            def run(self):
                for step in range(6):
                    loss = self.loss(step)
                    if not torch.isfinite(loss):  # <- HERE
                        continue
                    dist.backward((10,), (20,))
                    dist.all_reduce(torch.ones(1))
        Trainer().run()
        dist.barrier()
        """),
    Row("nan skip with a log before it", "mismatch", (1,), """
        rank = dist.get_rank()
        def log(x):
            dist.all_reduce(torch.ones(1))
        for step in range(6):
            loss = torch.scalar(float("nan") if rank == 1 and step == 3 else 0.5)
            log(loss)
            if not torch.isfinite(loss):  # <- HERE
                continue
            dist.backward()
        """),
    Row("nested loops, inner skip", "mismatch|missing", (1,), """
        rank = dist.get_rank()
        for epoch in range(2):
            for step in range(4):
                batch = [] if rank == 1 and step == 2 else [1]
                if len(batch) == 0:  # <- HERE
                    continue
                dist.backward()
            dist.all_reduce(torch.ones(2))
        """),
    Row("swallowed", "mismatch", (1,), """
        def decode(step, rank):
            if rank == 1 and step == 3:
                raise ValueError("no")
            return step
        def main():
            rank = dist.get_rank()
            for step in range(6):
                try:
                    x = decode(step, rank)
                    dist.backward()
                except Exception as error:  # <- HERE
                    message = str(error)
                dist.all_reduce(torch.ones(3))
        main()
        """),
    Row("swallowed, off by one", "mismatch", (1,), """
        def main():
            rank = dist.get_rank()
            for step in range(6):
                try:
                    x = [1][1 if rank == 1 and step == 3 else 0]
                    dist.backward()
                except IndexError:  # <- HERE
                    pass
            dist.barrier()
        main()
        """),
    Row("swallowed in a callee", "mismatch", (2,), {"train.py": """
        import load
        def main():
            rank = dist.get_rank()
            for step in range(5):
                load.step(rank, step)
                if step % 2 == 0:
                    dist.broadcast(torch.ones(3))
        main()
        """, "load.py": """
        def step(rank, step):
            try:
                x = {0: 1}[1 if rank == 2 and step == 2 else 0]
                dist.backward()
            except KeyError:  # <- HERE
                return None
            return x
        """}),
    Row("suppress", "mismatch", (2,), """
        from contextlib import suppress
        rank = dist.get_rank()
        for step in range(5):
            with suppress(KeyError):  # <- HERE
                x = {0: 1}[1 if rank == 2 and step == 2 else 0]
                dist.backward()
            dist.broadcast(torch.ones(3))
        """),
    Row("extra collective in a handler", "mismatch", (1,), """
        cache = {} if dist.get_rank() == 1 else {"plan": 1}
        def plan():
            try:
                return cache["plan"]
            except KeyError:  # <- HERE
                dist.all_reduce(torch.ones(2))
                return 2
        dist.barrier()
        plan()
        dist.backward()
        """),
    Row("a cold cache", "mismatch", (1,), """
        class Compiler:
            def __init__(self): self.cache = set() if dist.get_rank() == 1 else {"graph"}
            def get(self, key):
                if key not in self.cache:  # <- HERE
                    dist.all_reduce(torch.ones(2))
                    self.cache.add(key)
                return key
        compiler = Compiler()
        for step in range(3):
            compiler.get("graph")
            dist.backward()
        """),
    Row("a signal seen by one", "mismatch", (0,), """
        rank = dist.get_rank()
        def checkpoint():
            dist.all_gather([], torch.ones(9))
        for step in range(6):
            dist.backward()
            stop = rank == 0 and step == 3
            if stop:  # <- HERE
                checkpoint()
                break
        """),
    Row("an unlucky layer", "mismatch", (2,), """
        class Layer:
            def forward(self, x):
                dist.all_gather([], torch.ones(9))
                return x
        class Net:
            def __init__(self): self.layers = [Layer(), Layer()]
            def forward(self, x, dropped):
                for index, layer in enumerate(self.layers):
                    if index == dropped:  # <- HERE
                        continue
                    x = dist.call(layer, x)
                dist.all_reduce(torch.ones(1))
                return x
        net = Net()
        for step in range(3):
            net.forward(1, 1 if dist.get_rank() == 2 and step == 1 else None)
        """),
    Row("an expert without tokens", "mismatch|missing", (1,), """
        rank = dist.get_rank()
        def experts(step):
            for expert in range(3):
                tokens = 0 if rank == 1 and step == 2 and expert == 1 else 5
                if tokens == 0:  # <- HERE
                    continue
                dist.all_reduce(torch.ones(10 + expert))
        for step in range(4):
            experts(step)
        """),
    Row("a per-rank accumulation", "mismatch", (2,), """
        rank = dist.get_rank()
        seen = 1 if rank == 2 else 0
        for micro in range(8):
            seen += 1
            if seen % 4 == 0:  # <- HERE
                dist.backward()
            if micro % 2 == 0:
                dist.all_reduce(torch.ones(1))
        """),
    Row("reduce instead of all_reduce", "mismatch", (0,), """
        rank = dist.get_rank()
        best = 5
        for epoch in range(3):
            loss = 4 if rank == 0 and epoch == 1 else 6
            dist.reduce(torch.ones(1), 0)
            if loss < best:  # <- HERE
                best = loss
                dist.all_gather([], torch.ones(30))
            dist.backward()
        """),
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


def _judged(row: Row, folder: Path) -> tuple[Verdict | None, list[tuple[str, int]]]:
    files = row.source if isinstance(row.source, dict) else {"train.py": row.source}
    world = World(folder, files, row.nproc).run()
    try:
        return judge(world.views()), world.marked()
    finally:
        world.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_line(row: Row, tmp_path: Path) -> None:
    verdict, marked = _judged(row, tmp_path)
    assert verdict is not None
    found = (verdict.kind, verdict.ranks, verdict.left_at and (verdict.left_at.file, verdict.left_at.line))
    assert found[0] in row.kinds.split("|"), verdict
    assert found[1] == row.ranks, verdict
    assert found[2] in marked, verdict
