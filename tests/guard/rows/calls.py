"""Ranks that do not all make a call, or not as often as the others."""

from __future__ import annotations

from tests.guard.rows import Row

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
]  # fmt: skip
