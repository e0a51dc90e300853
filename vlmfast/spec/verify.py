"""Which part of a draft the target model would have written itself: exact at temperature 0 and above it.

Nothing here knows how a draft was made. Medusa's "typical acceptance" (arXiv 2401.10774, section 3.3.1) is not exact
above temperature 0 and has no place here; the tests keep it as the rule that must fail them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vlmfast.sample import Sampler
from vlmfast.spec.tree import ROOT, Acceptance, DraftTree


def verify(tree: DraftTree, logits: Tensor, sampler: Sampler, best: Sequence[int] | None = None) -> Acceptance:
    """The accepted path through a draft and the token after it; the sampler remembers all of them.

    logits [K + 1, V] are the target's: row 0 after the root, row i + 1 after node i; `best` is what
    `vlmfast.sample.likeliest` says of them, where it was asked. At each node the target chooses its next token as it
    would without a draft, and the walk goes on where a child has that token. So a tree that was not drawn changes
    nothing at all: with one seed, even the draws are those of the plain run. Siblings of one token are one choice, and
    the first is taken.

    Raises:
        ModelError: a row of logits is not numbers.
    """
    if best is not None and tree.is_chain and sampler.takes_best:
        length = 0
        while length < len(tree) and best[length] == tree.tokens[length]:
            length += 1
        return Acceptance(path=tuple(range(length)), token=sampler.choose(logits[length], best[length]))
    following: dict[int, list[int]] = {}
    for child, parent in enumerate(tree.parents):
        following.setdefault(parent, []).append(child)
    node, path = ROOT, list[int]()
    while True:
        children = following.get(node, [])
        row, known = logits[node + 1], None if best is None else best[node + 1]
        if tree.proposals and children and not sampler.is_greedy:
            token = _choose_among(children, tree, row, sampler, known)
        else:
            token = sampler.choose(row, known)
        fitting = [child for child in children if tree.tokens[child] == token]
        if not fitting:
            return Acceptance(path=tuple(path), token=token)
        node = fitting[0]
        path.append(node)


def _choose_among(children: list[int], tree: DraftTree, logits: Tensor, sampler: Sampler, best: int | None) -> int:
    """The next token where the children were drawn from distributions q: it follows the target's p all the same.

    A child x is accepted with probability min(1, p(x) / q(x)); after a rejection p becomes max(p - q, 0), normalised
    (Leviathan et al., arXiv 2211.17192, theorem 1; child after child as in arXiv 2305.09781, algorithm 2). When all
    are rejected the token is drawn from what p has become.
    """
    target = sampler.distribution(logits, best)
    for child in children:
        token, proposal = tree.tokens[child], tree.proposals[child]
        if sampler.chance() * float(proposal[token]) < float(target[token]):
            return sampler.remember(token)
        target = _residual(target, proposal)
    return sampler.remember(sampler.draw(target))


def _residual(target: Tensor, proposal: Tensor) -> Tensor:
    """What is left of a distribution [V] after a draw from another was rejected."""
    left = (target - proposal).clamp_min(0.0)
    total = left.sum()
    # Where both are equal nothing can be rejected but by rounding.
    return left / total if total > 0 else target
