"""Sums over the steps of an episode that decay from each step to the one before it.

Steps stand in runs one after the other, an episode each; ``ends`` [runs] are the places behind them.
"""

import numpy as np

SHORT = 32  # runs up to this long are summed one step at a time
WIDTH = 8  # steps of a piece of a longer run
NOTHING = 1e-30  # a share this small of what follows is dropped


def run_ends(labels: np.ndarray) -> np.ndarray:
    """[runs] the places behind each run of equal labels; of 3 3 5 they are 2 and 3."""
    return np.append(np.flatnonzero(labels[1:] != labels[:-1]) + 1, len(labels))[: len(labels)]


def lambda_advantages(reward: np.ndarray, values: np.ndarray, ends: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """[n] ``A = r + gamma V' - V + gamma lam A'``, where ' is the run's next step; 0 behind its last."""
    delta = following(values, ends)
    if gamma != 1:
        delta *= gamma
    delta += reward
    delta -= values
    return _decayed(delta, ends, gamma * lam)


def following(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """[n] the run's next value, 0 at its last."""
    out = np.empty(len(values))
    out[:-1] = values[1:]
    out[ends - 1] = 0.0
    return out


def decayed_sum(delta: np.ndarray, ends: np.ndarray, decay: float | np.ndarray) -> np.ndarray:
    """[n] ``A[t] = delta[t] + decay[t] * A[t + 1]`` within runs; ``decay`` is one number or [n]."""
    return _decayed(delta.copy(), ends, decay)


def _decayed(out: np.ndarray, ends: np.ndarray, decay: float | np.ndarray) -> np.ndarray:
    """``decayed_sum`` in place."""
    start = 0
    for end in ends.tolist():
        own, share = out[start:end], decay[start:end] if isinstance(decay, np.ndarray) else decay
        if isinstance(share, np.ndarray) and share[0] == share[-1] and np.all(share == share[0]):
            share = float(share[0])  # many of one number give the bits of that number
        if len(own) <= SHORT and (isinstance(share, np.ndarray) or share != 1):
            _sum_by_step(own, share)
        elif isinstance(share, np.ndarray):
            _sum_by_piece(own, share)
        elif share == 1:
            np.add.accumulate(own[::-1], out=own[::-1])
        else:
            _sum_by_doubling(own, share)
        start = end
    return out


def _sum_by_step(out: np.ndarray, decay: float | np.ndarray) -> None:
    total, share = 0.0, np.broadcast_to(decay, len(out)).tolist()
    for t in range(len(out) - 1, -1, -1):
        total = out[t] = float(out[t]) + share[t] * total


def _sum_by_doubling(out: np.ndarray, decay: float) -> None:
    """After k rounds each sum reaches over 2^k steps."""
    reach = 1
    while reach < len(out) and decay > NOTHING:
        out[:-reach] += decay * out[reach:]
        decay *= decay
        reach *= 2


def _sum_by_piece(out: np.ndarray, decay: np.ndarray) -> None:
    """Within pieces of ``WIDTH`` steps, all side by side; then over the first steps of the pieces, which are a run themselves."""
    if len(out) <= SHORT:
        return _sum_by_step(out, decay)
    total, reach = _pieces(out), _pieces(decay)  # reach becomes what a step gets of the next piece's first sum
    for j in range(WIDTH - 2, -1, -1):
        total[j] += reach[j] * total[j + 1]
        reach[j] *= reach[j + 1]
    first = total[0].copy()
    _sum_by_piece(first, reach[0])
    total[:, :-1] += reach[:, :-1] * first[1:]
    out[:] = total.T.reshape(-1)[: len(out)]


def _pieces(values: np.ndarray) -> np.ndarray:
    """[WIDTH, pieces] the values [n] piece by piece, the last one filled up with 0."""
    whole = np.zeros((-(-len(values) // WIDTH), WIDTH))
    whole.reshape(-1)[: len(values)] = values
    return whole.T.copy()
