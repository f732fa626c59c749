"""The re-rank rule under arbitrary changes of membership."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastictrain.topology import Candidate, Round, Seat, assign_seats

names = st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True)


def candidates(numbers: list[int]) -> list[Candidate]:
    return [Candidate(worker_id=f"w{n}", node_id=f"n{n % 3}", local_rank=n) for n in numbers]


@given(st.lists(names, min_size=1, max_size=6))
def test_seats_keep_every_rule_when_membership_changes_again_and_again(worlds: list[list[int]]) -> None:
    seats: tuple[Seat, ...] = ()
    for numbers in worlds:
        before = seats
        seats = assign_seats(before, candidates(numbers))
        assert [seat.rank for seat in seats] == list(range(len(numbers)))
        assert {seat.worker_id for seat in seats} == {f"w{n}" for n in numbers}
        assert len({seat.stream for seat in seats}) == len(seats)
        ids = [seat.worker_id for seat in seats]
        survivors = [seat for seat in before if seat.worker_id in ids]
        assert [name for name in ids if name in {seat.worker_id for seat in survivors}] == [
            seat.worker_id for seat in survivors
        ]
        streams = {seat.worker_id: seat.stream for seat in seats}
        assert all(streams[seat.worker_id] == seat.stream for seat in survivors)


@given(names, st.data())
def test_replacement_takes_rank_and_stream_of_the_lost_worker_when_one_comes_for_one(
    numbers: list[int], data: st.DataObject
) -> None:
    before = assign_seats((), candidates(numbers))
    lost = data.draw(st.sampled_from(before))
    rest = [n for n in numbers if f"w{n}" != lost.worker_id]
    after = assign_seats(before, candidates([*rest, 99]))
    (new,) = [seat for seat in after if seat.worker_id == "w99"]
    assert (new.rank, new.stream) == (lost.rank, lost.stream)
    assert {s.worker_id: s.rank for s in after if s is not new} == {
        s.worker_id: s.rank for s in before if s is not lost
    }


@given(names, st.integers(1, 9), st.text(max_size=5))
def test_round_comes_back_equal_when_it_went_through_json(numbers: list[int], generation: int, reason: str) -> None:
    made = Round(
        generation=generation,
        seats=assign_seats((), candidates(numbers)),
        store_host="h",
        store_port=1,
        reason=reason,
    )
    assert Round.from_json(made.to_json()) == made
