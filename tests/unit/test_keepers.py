"""Runs of many nodes: who sees all, and what the keepers do for the others."""

from __future__ import annotations

import pytest
from test_rendezvous_protocol import made, member, seen, step, told, worker

from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.protocol import State, start
from elastictrain.rendezvous.records import Broken, Keeper, Plan, Position, Settings, Stop

NAMES = "abcdefghijkl"


def settings(**values: float) -> Settings:
    chosen = {"max_nodes": len(NAMES), "last_call_timeout_s": 5.0, "see_all_up_to": 2, **values}
    return Settings(run_id="run", **chosen)  # type: ignore[arg-type]


def keeper(number: int, node_id: str, *, revision: int = 20) -> ev.KeeperSeen:
    return ev.KeeperSeen(keeper=Keeper(number=number, node_id=node_id), revision=revision)


def present(node_id: str, **values: float) -> State:
    """A node of a large run whose key the store has shown, and nothing else."""
    state = start(settings(**values), node_id=node_id, host=f"{node_id}.local", store_port=29500)
    config = ev.ConfigSeen(config=state.settings.config())
    ready = ev.NodeReady(candidates=(worker(f"{node_id}0"),))
    state, effects = step(state, ready, ev.SnapshotSeen(changes=(config,), revision=1, is_partial=True))
    assert effects == []
    return state


def shown(node_id: str, **values: float) -> ev.MemberSeen:
    return seen(member(node_id, f"{node_id}0"), created=10 + NAMES.index(node_id))


def running(node_id: str, *, as_keeper: bool = False) -> State:
    """A node in generation 1 of all, with `a` and `b` for keepers, and this node if asked."""
    state, _ = step(present(node_id), told(shown(node_id)), told(keeper(0, "a", revision=21)))
    entered = ev.RoundSeen(round=made(1, *(f"{name}0" for name in NAMES)), revision=30)
    state, effects = step(state, told(entered, keeper(1, "b", revision=31)))
    assert any(isinstance(one, ev.EnterRound) for one in effects)
    if as_keeper:
        state, _ = step(state, told(keeper(2, node_id, revision=32)), whole(entered, node_id))
        assert state.sees_all
    return state


def whole(entered: ev.RoundSeen, node_id: str) -> ev.SnapshotSeen:
    keepers = (keeper(0, "a", revision=21), keeper(1, "b", revision=31), keeper(2, node_id, revision=32))
    config = ev.ConfigSeen(config=settings().config())
    return ev.SnapshotSeen(changes=(config, entered, *keepers, *map(shown, NAMES)), revision=40)


def test_node_asks_to_be_keeper_when_there_is_none_and_sees_all_when_it_is() -> None:
    state, effects = step(present("c"), told(shown("c")))
    assert ev.CreateKeeper(keeper=Keeper(number=0, node_id="c")) in effects
    assert ev.WatchAll() not in effects
    state, effects = step(state, told(keeper(0, "c")))
    assert effects == [ev.WatchAll()]
    state, effects = step(state, told(keeper(1, "a")))
    assert effects == []


def test_node_does_not_ask_when_another_one_is_keeper() -> None:
    state, effects = step(present("c"), told(keeper(0, "a")), told(shown("c")))
    assert not [one for one in effects if isinstance(one, ev.CreateKeeper | ev.WatchAll)]
    assert not state.sees_all


@pytest.mark.parametrize(("node_id", "is_asking"), [("c", True), ("l", False)])
def test_nodes_at_the_front_of_the_round_take_the_places_of_keepers_when_some_are_vacant(
    node_id: str, is_asking: bool
) -> None:
    state, _ = step(running(node_id), told(ev.KeeperGone(number=1, revision=50)))
    assert (state.keeper_sent == 1) is is_asking


def test_every_node_asks_when_no_keeper_is_left() -> None:
    gone = told(ev.KeeperGone(number=0, revision=50), ev.KeeperGone(number=1, revision=50))
    _, effects = step(running("l"), gone)
    assert effects == [ev.CreateKeeper(keeper=Keeper(number=0, node_id="l"))]


def test_old_word_of_a_keeper_is_not_believed_when_it_is_gone() -> None:
    gone = told(ev.KeeperGone(number=0, revision=50), ev.KeeperGone(number=1, revision=50))
    state, effects = step(running("l"), gone, told(keeper(0, "a", revision=21)))
    assert state.keepers == {}
    assert len(effects) == 1


def test_keeper_declares_a_loss_when_older_keepers_let_their_time_pass() -> None:
    state, effects = step(running("c", as_keeper=True), told(ev.MemberGone(node_id="k", revision=50)))
    assert effects == []
    lost = Broken(generation=1, cause="node_lost", node_id="k", detail="node k is gone")
    state, effects = step(state, ev.DeadlineReached(), now_s=2.0)
    assert ev.CreateBroken(broken=lost) in effects


def test_node_that_sees_only_itself_takes_nobody_for_lost() -> None:
    state, effects = step(running("l"), ev.DeadlineReached(), now_s=1000.0)
    assert effects == []
    assert state.deadline_s is None


def test_keeper_plans_for_a_newcomer_when_there_is_a_seat_for_it() -> None:
    full, _ = step(running("c", as_keeper=True), told(seen(member("z", "z0"), created=60)))
    assert full.plan_sent == 0
    gone = told(ev.MemberGone(node_id="k", revision=70))
    state, effects = step(full, gone, told(ev.BrokenSeen(broken=Broken(generation=1, cause="node_lost", node_id="k"))))
    rest = [name for name in NAMES if name != "k"]
    parked = [seen(member(name, f"{name}0", settled=1), created=shown(name).revision, revision=80) for name in rest]
    second = ev.RoundSeen(round=made(2, *(f"{name}0" for name in rest)), revision=90)
    state, effects = step(state, told(*parked), told(second))
    assert ev.CreatePlan(plan=Plan(generation=2, kind="join", node_id="z")) in effects


def test_keeper_names_the_step_when_every_node_has_said_its_own() -> None:
    plan = ev.PlanSeen(plan=Plan(generation=1, kind="leave", node_id="d"))
    state, effects = step(running("c", as_keeper=True), told(plan), ev.LocalPosition(generation=1, step=5))
    assert effects == [ev.ReportPosition(generation=1)]

    def told_position(name: str) -> ev.StoreChanged:
        position = Position(generation=1, step=7 if name == "e" else 5)
        return told(seen(member(name, position=position), created=shown(name).revision, revision=60))

    state, effects = step(state, *map(told_position, NAMES[:-1]))
    assert effects == []
    state, effects = step(state, told_position(NAMES[-1]))
    stop = Stop(generation=1, step=7)
    assert effects == [ev.CreateStop(stop=stop)]
    state, effects = step(state, told(ev.StopSeen(stop=stop)))
    assert effects == [ev.StopAt(generation=1, step=7)]


def test_node_stops_behind_the_step_that_a_keeper_has_named() -> None:
    plan = ev.PlanSeen(plan=Plan(generation=1, kind="leave", node_id="d"))
    stop = ev.StopSeen(stop=Stop(generation=1, step=7))
    _, effects = step(running("l"), told(plan), ev.LocalPosition(generation=1, step=5), told(stop), told(stop))
    assert effects == [ev.ReportPosition(generation=1), ev.StopAt(generation=1, step=7)]


def test_node_looks_for_itself_who_is_missing_when_the_join_timeout_is_over() -> None:
    state, effects = step(present("c", min_nodes=2, join_timeout_s=60.0), told(keeper(0, "a"), shown("c")))
    assert [type(one) for one in effects] == [ev.Waiting]
    assert state.deadline_s == 60.0
    state, effects = step(state, ev.DeadlineReached(), now_s=60.0)
    assert effects == [ev.WatchAll()]
    config = ev.ConfigSeen(config=state.settings.config())
    alone = ev.SnapshotSeen(changes=(config, shown("c")), revision=90)
    _, effects = step(state, alone, now_s=61.0)
    (refused,) = [one for one in effects if isinstance(one, ev.Refused)]
    assert refused.message.startswith("1 of at least 2 nodes after 60 s")


def test_node_with_other_options_looks_for_members_before_it_is_refused() -> None:
    state = start(settings(), node_id="c", host="c.local", store_port=29500)
    config = ev.ConfigSeen(config=settings(max_nodes=99).config())
    ready = ev.NodeReady(candidates=())
    state, effects = step(state, ready, ev.SnapshotSeen(changes=(config,), revision=1, is_partial=True))
    assert effects == [ev.WatchAll()]
    _, effects = step(state, ev.SnapshotSeen(changes=(config, shown("a")), revision=2))
    assert [type(one) for one in effects] == [ev.Refused]
