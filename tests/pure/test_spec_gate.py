"""The gate in simulated engines: step costs and acceptance are given, the clock is the sum of both."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from vlmfast.spec.costs import StepCosts
from vlmfast.spec.gate import Gate
from vlmfast.spec.tree import NO_DRAFT, ROOT, Acceptance, DraftTree

Cost = Callable[[int], float]


@dataclass(kw_only=True)
class Engine:
    """Decodes for some sequences; a drafted token is accepted with a probability that depends on its origin."""

    gate: Gate
    cost: Cost
    accept: dict[str, float]
    num_sequences: int = 1
    draft_ms: float = 0.0
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    ms: float = 0.0
    num_tokens: int = 0
    drafted: list[int] = field(default_factory=list)

    def step(self, offers: list[DraftTree]) -> None:
        drafts = [NO_DRAFT] * self.num_sequences
        draft_ms = 0.0
        if not self.gate.is_resting:
            drafts = self.gate.choose([offers] * self.num_sequences)
            draft_ms = self.draft_ms
        num_chosen = 0
        for draft in drafts:
            acceptance = self.verified(draft)
            num_chosen += len(acceptance.path) + 1
            if len(draft):
                self.gate.observe(draft, acceptance)
        self.drafted.append(sum(len(draft) for draft in drafts))
        step_ms = self.cost(self.num_sequences + self.drafted[-1]) * (1 + self.noise * self.rng.expovariate(1.0))
        self.gate.timed(
            num_sequences=self.num_sequences,
            num_drafted=self.drafted[-1],
            num_chosen=num_chosen,
            draft_ms=draft_ms,
            step_ms=step_ms,
        )
        self.ms += self.cost(self.num_sequences + self.drafted[-1]) + draft_ms
        self.num_tokens += num_chosen

    def verified(self, draft: DraftTree) -> Acceptance:
        node, path = ROOT, []
        while True:
            fitting = [child for child in draft.children(node) if self.rng.random() < self.accept[draft.origin]]
            if not fitting:
                return Acceptance(path=tuple(path), token=0)
            node = fitting[0]
            path.append(node)

    @property
    def speedup(self) -> float:
        """Over decoding without drafts."""
        return self.num_tokens / self.num_sequences * self.cost(self.num_sequences) / self.ms


def cheap(num_tokens: int) -> float:
    return 10.0 + 0.2 * (num_tokens - 1)


def dear(num_tokens: int) -> float:
    return 10.0 + 7.0 * (num_tokens - 1)


def _chain(size: int = 15, origin: str = "x") -> DraftTree:
    return DraftTree.chain(range(size), origin=origin)


def _run(steps: int, offers: list[DraftTree], **engine: object) -> Engine:
    simulated = Engine(gate=Gate(), **{"cost": cheap, "accept": {"x": 0.0}, **engine})  # type: ignore[arg-type]
    for _ in range(steps):
        simulated.step(offers)
    return simulated


@pytest.mark.parametrize("cost", [cheap, dear])
@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("steps", [60, 400, 3000])
def test_drafts_that_never_fit_cost_little(cost: Cost, noise: float, steps: int) -> None:
    """Guards case 41 (AngelSlim 222): the gate goes down to no drafts; over a job they cost at most 5 %."""
    engine = _run(steps, [_chain()], cost=cost, noise=noise)
    assert engine.speedup > (0.95 if steps > 60 else 0.92)
    assert noise or sum(map(bool, engine.drafted[steps // 2 :])) < steps / 20


@pytest.mark.parametrize("draft_ms", [0.1, 1.0, 30.0])
def test_dear_proposals_are_given_up(draft_ms: float) -> None:
    """Guards the time that proposing takes, which counts though nothing is verified."""
    assert _run(3000, [_chain()], draft_ms=draft_ms).speedup > 0.95


@pytest.mark.parametrize(("accept", "least"), [(1.0, 10.0), (0.9, 4.5), (0.5, 1.6)])
def test_drafts_that_fit_are_taken_whole(accept: float, least: float) -> None:
    """Guards the gain: cheap passes and good drafts, close to what the acceptance allows."""
    assert _run(1000, [_chain()], accept={"x": accept}).speedup > least


def test_dear_passes_make_drafts_short() -> None:
    """Guards the step cost: the same drafts, where a token more costs 70 % of a pass."""
    engine = _run(1000, [_chain()], cost=dear, accept={"x": 0.6})
    assert max(engine.drafted[500:]) <= 4  # an exploration at most
    assert engine.speedup > 0.97
    better = _run(1000, [_chain()], cost=dear, accept={"x": 0.98})
    assert better.speedup > 1.1


def test_drafts_shrink_as_the_batch_grows() -> None:
    """Guards case 43's kind: passes that grow dear beyond 16 tokens leave a batch of 8 little room."""

    def bent(num_tokens: int) -> float:
        return 10.0 + 0.1 * num_tokens + 2.0 * max(num_tokens - 16, 0)

    lengths = []
    for num_sequences in (1, 4, 8, 16):
        engine = _run(600, [_chain()], cost=bent, accept={"x": 0.8}, num_sequences=num_sequences)
        lengths.append(sum(engine.drafted[300:]) / 300 / num_sequences)
        assert engine.speedup > 0.97
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 5 > 2 > lengths[2] and lengths[3] < 1


def test_the_better_drafter_is_taken() -> None:
    """Guards the choice between drafters: by what each was worth, not by what it offers."""
    engine = _run(500, [_chain(15, "bad"), _chain(3, "good")], accept={"bad": 0.05, "good": 0.95})
    assert engine.speedup > 2.8


def test_statistics_follow_the_text() -> None:
    """Guards a job whose pictures change: drafts are tried again after they failed, and given up again."""
    engine = _run(800, [_chain()], accept={"x": 0.0})
    before = engine.num_tokens / engine.ms
    engine.accept["x"] = 0.9
    for _ in range(800):
        engine.step([_chain()])
    assert sum(map(bool, engine.drafted[-200:])) > 190
    engine.accept["x"] = 0.0
    for _ in range(400):
        engine.step([_chain()])
    tokens, ms = engine.num_tokens, engine.ms
    for _ in range(400):
        engine.step([_chain()])
    assert (engine.num_tokens - tokens) * cheap(1) / (engine.ms - ms) > 0.95
    assert engine.num_tokens / engine.ms > before


def test_gains_are_not_spent_on_what_fails() -> None:
    """Guards a job that turns bad after a good start: its own part costs at most 5 %, too."""
    engine = _run(2000, [_chain()], accept={"x": 0.95}, draft_ms=0.4)
    tokens, ms = engine.num_tokens, engine.ms
    engine.accept["x"] = 0.0
    for _ in range(1500):
        engine.step([_chain()])
    assert (engine.num_tokens - tokens) * cheap(1) / (engine.ms - ms) > 0.95


def test_a_run_of_bad_luck_does_not_end_what_pays() -> None:
    """Guards dear drafts, as a model's are: each that fails loses a whole step, though on the whole they gain."""
    engine = _run(3000, [_chain(8)], accept={"x": 0.75}, draft_ms=6.0)
    assert sum(map(bool, engine.drafted)) > 0.95 * len(engine.drafted)
    assert engine.speedup > 1.7


def test_trees_are_cut_from_their_end() -> None:
    """Guards trees: unlikely branches go first, and what is left is a tree."""
    gate = Gate()
    tree = DraftTree(tokens=(1, 2, 3, 4), parents=(-1, -1, 0, 1), origin="t")
    for _ in range(50):
        gate.observe(tree, Acceptance(path=(0, 2), token=0))
    gains = gate.gains(tree)
    assert gains == sorted(gains, reverse=True) and gains[0] > 0.9 and gains[1] < 0.1
    assert gate.choose([[tree]]) == [NO_DRAFT] and gate.is_resting  # plain steps are timed first
    while gate.is_resting:
        gate.timed(num_sequences=1, num_drafted=0, num_chosen=1, draft_ms=0, step_ms=10)
    gate.timed(num_sequences=1, num_drafted=4, num_chosen=3, draft_ms=0, step_ms=11)
    (chosen,) = gate.choose([[tree]])
    assert chosen.tokens in ((1,), tree.tokens)


def test_gains_of_single_answers_are_not_lost_by_many() -> None:
    """Guards a server that is asked by one and then by many: what drafting won before is no licence to lose."""
    engine = Engine(gate=Gate(), cost=cheap, accept={"x": 0.9})
    for _ in range(300):
        engine.step([_chain()])
    assert engine.speedup > 2
    engine.accept, engine.num_sequences, engine.ms, engine.num_tokens = {"x": 0.0}, 8, 0.0, 0
    engine.cost = lambda n: 10 + 0.3 * (n - 1)
    for _ in range(60):
        engine.step([_chain()])
    assert engine.speedup > 0.95


def test_reading_what_a_rest_has_missed_does_not_end_the_try() -> None:
    """Guards jobs after a rest: answers that wait to be read cost more than a first draft can win."""
    engine = _run(60, [_chain()], accept={"x": 0.0}, draft_ms=0.1)
    for _ in range(60):
        engine.gate.spent(1000.0)
        engine.step([_chain()])
    assert engine.gate._rest < 600


def _with_pictures(every: int, steps: int, num_sequences: int = 1) -> Engine:
    """Each `every` steps there is one that encodes, and the three after it are half as slow again."""
    engine = Engine(gate=Gate(), cost=cheap, accept={"x": 0.9}, num_sequences=num_sequences)
    for index in range(steps):
        since = index % every
        if since == 0:
            engine.gate.mixed()
        engine.cost = (lambda n: 1.5 * cheap(n)) if since < 3 else cheap
        engine.step([_chain()])
    return engine


def test_steps_after_a_picture_are_not_what_steps_cost() -> None:
    """Guards the gate from slow steps: they would make plain steps, or drafts, look dearer than they are."""
    engine = _with_pictures(5, 600)
    (costs,) = engine.gate._costs.values()
    assert all(costs(width) == pytest.approx(cheap(width)) for width in costs._widths)
    assert engine.num_tokens > 2.5 * 600


@pytest.mark.parametrize("num_sequences", (1, 2, 8))
def test_several_do_not_draft_their_first_words(num_sequences: int) -> None:
    """Guards batches of short answers: a draft in slow steps costs several more than is ever learnt of it."""
    engine = Engine(gate=Gate(), cost=cheap, accept={"x": 0.9}, num_sequences=num_sequences)
    for _ in range(60):
        engine.step([_chain()])
    assert engine.drafted[-1]
    engine.gate._loss_ms = 0.0  # nothing is won that a draft might lose
    engine.gate.mixed()
    for _ in range(4):
        engine.step([_chain()])
    assert [number > 0 for number in engine.drafted[-4:]] == [num_sequences == 1] * 3 + [True]


@pytest.mark.parametrize("earned", (True, False))
def test_several_draft_beside_requests_that_do_not(earned: bool) -> None:
    """Guards servers with a request whose steps are never timed: drafts go on, or come back."""
    gate, offers = Gate(), [[_chain()], [_chain()]]
    engine = Engine(gate=gate, cost=cheap, accept={"x": 0.9}, num_sequences=2)
    for _ in range(60):
        engine.step([_chain()])
    gate._loss_ms = gate._loss_ms if earned else 0.0
    drafted = []
    for _ in range(100):
        drafted.append(any(map(len, gate.choose(offers))))
        gate.mixed()
    assert all(drafted[60:]) and all(drafted) is earned


@pytest.mark.parametrize("num_sequences", (1, 4))
def test_an_engine_that_is_never_warm_drafts_all_the_same(num_sequences: int) -> None:
    """Guards busy servers: where pictures come all the time, times after them are the only ones."""
    for every in (3, 5, 8):
        engine = _with_pictures(every, 600, num_sequences)
        assert engine.num_tokens > 2.5 * 600 * num_sequences


def test_without_the_gate_everything_is_drafted() -> None:
    gate = Gate(adaptive=False)
    assert gate.choose([[_chain(3), _chain(5)], [], [NO_DRAFT]]) == [_chain(5), NO_DRAFT, NO_DRAFT]
    assert not gate.is_resting


def test_acceptance_is_reported_by_position() -> None:
    """Guards case 40 (SpecForge 310): what is measured can be looked at."""
    gate = Gate()
    for path in ((0, 1), (0,), (), (0, 1, 2)):
        gate.observe(_chain(3), Acceptance(path=path, token=0))
    assert gate.acceptance() == {"x": [0.75, 2 / 3, 0.5]}


def test_step_costs_lie_between_what_was_measured() -> None:
    costs = StepCosts()
    for _ in range(9):
        costs.add(1, 10.0)
        costs.add(9, 18.0)
    costs.add(9, 500.0)  # one slow step of a busy machine
    assert (costs(1), costs(5), costs(9)) == (10.0, 14.0, 18.0)
    assert costs(17) == 26.0 and costs.widest == 9
    for _ in range(2):
        costs.add(17, 90.0)  # not believed, far from what was expected
    assert costs(17) == 26.0
    costs.add(17, 90.0)
    assert costs(17) == 90.0
    costs.add(20, 9.0)  # a wider pass that is quicker: the narrower ones can not be dearer
    assert costs(1) == costs(5) == costs(9) == 9.0
