"""The coordinator of weight updates as a pure state machine: an event and the time go in, acts come out.

                 +--> off (resume, open) -----------------------------------+       called_off, cancelled
                 |  nobody was touched                                      v
    idle --> forward (prefetch ... load) --commit--> (confirm ... open) --> purge --> idle
      ^          |  loads failed too often           ^                      ^       committed, rolled_back
      |          +--> back (load ...) ---commit------+                      |
      |                    no pair holds anything --------------------------+       fenced
      +---- join (choose ... open): engines that came up, or that an update left behind

`phases.py` has the phases of each way. The machine knows its place (`Position`, the journal's newest record) and facts
(`Knowledge`); in a phase it asks every receiver for what it lacks (`needs.py`) until nobody lacks anything. Each phase,
retry and turn is recorded before its first command. A rebuilt machine knows no facts, so it reads all receivers
back first, and its attempt is a new one: whatever the machine before it sent is older and no longer obeyed.

The shell calls `step` with each event, carries the acts out in order, and calls again at `wake_at`.
"""

from __future__ import annotations

from collections.abc import Mapping

from connectors.vllm_plugin.weights.settings import LoadMode
from orchestrator.errors import UpdateRefused
from orchestrator.plan.weights import Limits
from orchestrator.weights import course as courses
from orchestrator.weights import events
from orchestrator.weights.acts import (
    POOL,
    ROUTER,
    TRAINER,
    Act,
    Ask,
    Command,
    ConfirmEpoch,
    Finish,
    Load,
    Prefetch,
    Purge,
    Record,
    Restart,
    Say,
    Serve,
    Wipe,
)
from orchestrator.weights.groups import has_pair, next_group, serves, update_refusal
from orchestrator.weights.knowledge import Knowledge
from orchestrator.weights.needs import need_of, receivers
from orchestrator.weights.phases import AFTER_GROUPS, CALLABLE_OFF, limit_s, next_phase
from orchestrator.weights.post import Post
from orchestrator.weights.words import BY_REQUEST, Fleet, Outcome, Phase, Position, Update


class Coordinator:
    """One job's."""

    def __init__(
        self, *, fleet: Fleet, wipes_pool: bool, position: Position, join_limits: Limits, join_mode: LoadMode
    ) -> None:
        """`position` is the journal's newest; `join_limits` and `join_mode` are for engines that join while no update
        runs."""
        self._known = Knowledge(fleet=fleet, wipes_pool=wipes_pool, position=position, engines=dict.fromkeys(fleet))
        self._post = Post()
        self._join_limits = join_limits
        self._join_mode = join_mode
        self._is_new = True
        self._acts: list[Act] = []
        self._deadline = 0.0
        self._due = 0.0
        """When the purge may begin, where there is anything to purge."""

    @property
    def position(self) -> Position:
        return self._known.position

    def wake_at(self, now: float) -> float:
        """When `step` wants to be called with `Ticked`, whatever else happens."""
        times = self._post.waking(now)
        if self.position.course is not None:
            times += [time for time in (self._deadline, self._due) if time > now]
        return min(times, default=now + self._join_limits.again_s)

    def step(self, event: events.Event, now: float) -> list[Act]:
        """Raises `UpdateRefused` for an update that cannot be begun; nothing has changed then."""
        if self._is_new:
            self._is_new = False
            self._record(courses.new_attempt(self.position))
            self._restart_clock(now)
        self._take(event, now)
        while self._advance(now):
            pass
        done, self._acts = self._acts, []
        return done

    def _take(self, event: events.Event, now: float) -> None:
        match event:
            case events.UpdateAsked():
                self._begin(event.update, now)
            case events.Cancelled():
                self._cancel(event.update, now)
            case events.Answered() | events.OutcomeLost() | events.EngineRead() | events.RouterRead():
                self._take_outcome(event, now)
            case events.EngineEnded():
                self._give_up(event.name, "its process ended")
            case events.EngineAwaited():
                self._post.drop(event.name)
                self._known.away.add(event.name)
            case events.EngineCameUp():
                self._post.drop(event.name)
                self._known.away.discard(event.name)
                self._known.engines[event.name] = None
            case events.Withdrawn():
                for name in event.names ^ self._known.withdrawn:
                    self._post.drop(name)
                    self._known.failed.pop(name, None)
                    self._known.engines[name] = None
                self._known.withdrawn = event.names
            case events.RouterCameUp():
                self._post.drop(ROUTER)
                self._known.forget_router()
            case events.Ticked():
                pass

    def _take_outcome(
        self, event: events.Answered | events.OutcomeLost | events.EngineRead | events.RouterRead, now: float
    ) -> None:
        command = self._post.take(event.order)
        if command is None:
            return
        name = command.receiver
        if isinstance(command.ask, Serve):
            self._known.asked.add(name)
        match event:
            case events.EngineRead(facts=facts):
                self._known.engines[name] = facts
                if facts.loading:
                    self._post.rest(name, now + self._limits.again_s)
                if facts.lost:
                    self._give_up(name, facts.unfit)
            case events.RouterRead(facts=facts):
                self._known.router = facts
            case events.Answered(error=""):
                self._known.carried_out(name, command.ask)
                self._note(name, command.ask)
            case events.Answered() | events.OutcomeLost():
                self._unsettle(command, event.error if isinstance(event, events.Answered) else "")
                self._post.rest(name, now + self._limits.again_s)

    def _note(self, name: str, done: Ask) -> None:
        match done:
            case Purge():
                self._record(courses.purged(self.position, done.epoch))
            case Wipe():
                self._record(courses.wiped(self.position))
            case Load() if self._known.course.going != "forward":
                where = done.peer or "its own source"
                self._acts.append(Say(text=f"{name} has loaded version {done.source['version']} from {where}"))

    def _unsettle(self, command: Command, error: str) -> None:
        """Refused, or nobody knows: what the receiver is now has to be read back."""
        if command.receiver == ROUTER:
            self._known.forget_router()
        elif command.receiver in self._known.fleet:
            self._known.engines[command.receiver] = None
            if error and isinstance(command.ask, Load | Prefetch):
                self._known.failed[command.receiver] = error

    @property
    def _limits(self) -> Limits:
        course = self.position.course
        return self._join_limits if course is None else course.update.limits

    def _begin(self, update: Update, now: float) -> None:
        course = self.position.course
        if course is not None and course.going != "join" and course.phase != "purge":
            raise UpdateRefused(f"update {course.update.number} is under way: cancel it, or wait for its end")
        if update.number <= self.position.last_update:
            raise UpdateRefused(f"update {update.number} is not above {self.position.last_update}, the newest so far")
        if update.version == self.position.committed.version:
            raise UpdateRefused(f"version {update.version!r} is what the job serves already: name new weights anew")
        known = self._known
        if refusal := update_refusal(known.fleet, known.withdrawn, update.strategy, wipes_pool=known.wipes_pool):
            raise UpdateRefused(refusal)
        self._forget_open()
        self._go(courses.begin(self.position, update), now)

    def _cancel(self, update: int, now: float) -> None:
        """Until the version has moved. Afterwards the way forward is the only one."""
        course = self.position.course
        if course is None or course.update.number != update or course.epoch == self.position.committed.epoch:
            return
        if course.going == "forward":
            self._forget_open()
            self._turn(BY_REQUEST, now, is_cancelled=True)

    def _forget_open(self) -> None:
        """Whoever has a command open may or may not have obeyed it."""
        for receiver in [*self._known.fleet, ROUTER, POOL, TRAINER]:
            if self._post.is_waiting(receiver):
                if receiver == ROUTER:
                    self._known.forget_router()
                elif receiver in self._known.fleet:
                    self._known.engines[receiver] = None
                self._post.drop(receiver)

    def _advance(self, now: float) -> bool:
        """Ask for what is lacking; go on where nothing is. Has the machine moved, so that it must look again?"""
        is_due = now >= self._due
        lacking = [name for name in receivers(self._known) if self._lacks(name, now, is_due=is_due)]
        if self.position.course is None:
            return self._wait_for_silent(now) if lacking else self._begin_join(now)
        if lacking or not is_due:
            return now >= self._deadline and self._overdue(lacking, now)
        match self.position.course.phase:
            case "choose":
                moved = self._choose(now)
            case "load":
                moved = self._judge_loads(now)
            case "prefetch" if self._known.failed:
                moved = self._turn(_told(self._known.failed), now)
            case _:
                moved = self._enter_next(next_phase(self.position.course), now)
        return moved or (now >= self._deadline and self._overdue([], now))

    def _lacks(self, receiver: str, now: float, *, is_due: bool) -> bool:
        if self._post.is_waiting(receiver):
            return True
        need = need_of(receiver, self._known, is_due=is_due)
        if need is None:
            return False
        if self._post.may_send(receiver, now):
            self._acts.append(self._post.send(receiver, need, self.position))
        return True

    def _choose(self, now: float) -> bool:
        known, course = self._known, self._known.course
        serving = known.serving()
        waiting = self._not_serving_in(course.epoch)
        arrived = [name for name in serving if serving[name] == course.epoch]
        if not waiting and (course.going == "join" or has_pair(arrived, known.fleet)):
            return self._enter_next(AFTER_GROUPS[course.going], now)
        group = next_group(
            fleet=known.fleet,
            waiting=waiting,
            now_serving=serving,
            epoch=course.epoch,
            pairs=course.update.limits.group_pairs,
        )
        if group:
            self._go(courses.enter(courses.choose(self.position, group), "drain"), now)
        return bool(group)

    def _not_serving_in(self, epoch: int) -> list[str]:
        known = self._known
        assert known.router is not None
        serving = known.serving()
        return [name for name in known.present() if name in known.router.replicas and serving.get(name) != epoch]

    def _judge_loads(self, now: float) -> bool:
        """All verdicts are in."""
        known, course, failed = self._known, self._known.course, self._known.failed
        if not failed:
            if course.update.strategy == "rolling" or has_pair(known.holders(), known.fleet):
                return self._enter_next(next_phase(course), now)
            # Whoever is away may come in time. Who goes back has nothing to wait for where none of them is wanted.
            if course.going == "forward" or has_pair(known.wanted(), known.fleet):
                return False
            return self._fence(course.why, now)
        # What is served may have lost its source, and a peer is asked from the second try on.
        tries = course.update.limits.tries if course.going == "forward" else max(course.update.limits.tries, 2)
        if course.failures + 1 < tries:
            if course.going != "forward":
                self._acts.append(Say(text=f"{_told(failed)}; tried again"))
            self._go(courses.retry(self.position), now)
        elif course.going == "forward":
            self._turn(_told(failed), now)
        else:
            for name, error in tuple(failed.items()):
                self._give_up(name, error)
        return True

    def _overdue(self, lacking: list[str], now: float) -> bool:
        """The phase has used up its time."""
        course = self._known.course
        why = f"{course.phase} took longer than {limit_s(course.phase, course.update.limits):g} s"
        late = [name for name in lacking if name in self._known.fleet]
        engines_alone = late == lacking and course.phase != "prefetch"
        if course.going == "forward" and course.phase in CALLABLE_OFF and not engines_alone:
            self._forget_open()
            return self._turn(f"{why}: {', '.join(lacking)}", now)
        if course.phase == "purge" or lacking == [POOL]:
            self._forget_open()
            self._known.answered.add(POOL)
            left = "older epochs stay in the pool until the next update" if POOL in lacking else ", ".join(lacking)
            self._acts.append(Say(text=f"{why}: {left}"))
            if course.phase == "purge":
                self._record(courses.leave(self.position))
        elif late:
            for name in late:
                self._give_up(name, why)
        elif course.phase == "load" and not lacking:
            self._fence(course.why or why, now)
        else:
            self._acts.append(Say(text=f"{why}: {', '.join(lacking) or 'engines that serve are too few'}; it goes on"))
            self._restart_clock(now)
        return True

    def _turn(self, why: str, now: float, *, is_cancelled: bool = False) -> bool:
        """Forward is no longer wanted, or does not work."""
        if self._known.is_untouched():
            self._go(courses.call_off(self.position, why, is_cancelled=is_cancelled), now)
        else:
            self._go(courses.turn_back(self.position, why), now)
        return True

    def _give_up(self, name: str, why: str) -> None:
        """Close its fence if it still listens, and start another life of it."""
        if name in self._known.away:
            return
        self._post.drop(name)
        engine = self._known.engines[name]
        if engine is not None:
            closing = ConfirmEpoch(instance=engine.instance, epoch=None)
            self._acts.append(self._post.send(name, closing, self.position))
            self._post.drop(name)
        self._known.away.add(name)
        self._known.engines[name] = None
        self._known.failed.pop(name, None)
        self._acts.append(Restart(name=name, why=why))

    def _wait_for_silent(self, now: float) -> bool:
        """Nobody joins before all are read; whoever does not answer in time must not keep the others from it."""
        silent = [name for name in self._known.present() if self._known.engines[name] is None]
        if now < self._deadline or not silent:
            return False
        for name in silent:
            self._give_up(name, f"it did not answer within {self._limits.command_s:g} s")
        self._restart_clock(now)
        return True

    def _begin_join(self, now: float) -> bool:
        self._restart_clock(now)
        known, committed = self._known, self.position.committed
        assert known.router is not None
        in_epoch = {name: epoch for name, epoch in known.serving().items() if epoch == committed.epoch}
        is_shut = known.router.gate != "open" and serves(in_epoch, known.fleet)
        if not is_shut and not self._not_serving_in(committed.epoch):
            return False
        self._go(courses.begin_join(self.position, self._join_limits, self._join_mode), now)
        return True

    def _enter_next(self, phase: Phase | None, now: float) -> bool:
        course = self._known.course
        if phase == "purge":
            self._end(courses.outcome_of(course), course.why, now)
        elif phase is not None:
            self._go(courses.enter(self.position, phase), now)
        else:
            self._record(courses.leave(self.position))
        return True

    def _end(self, outcome: Outcome, why: str, now: float) -> None:
        """Nobody waits for what is left to do."""
        self._go(courses.enter(courses.end(self.position, outcome, why), "purge"), now)
        assert self.position.ended is not None
        self._acts.append(Finish(ended=self.position.ended))

    def _fence(self, why: str, now: float) -> bool:
        self._end("fenced", f"{why}; no pair of engines holds {self._known.target.version}", now)
        return True

    def _go(self, position: Position, now: float) -> None:
        self._record(position)
        self._settle_in(now)

    def _settle_in(self, now: float) -> None:
        self._known.answered.clear()
        self._known.failed.clear()
        self._known.asked.clear()
        self._restart_clock(now)

    def _restart_clock(self, now: float) -> None:
        course = self.position.course
        if course is None:
            self._deadline = now + self._limits.command_s
        else:
            self._deadline = now + limit_s(course.phase, course.update.limits)
            purges = course.phase == "purge" and need_of(POOL, self._known, is_due=True) is not None
            self._due = now + course.update.limits.grace_s if purges else now

    def _record(self, position: Position) -> None:
        before = self.position
        if (before.last_update, before.attempt) != (position.last_update, position.attempt):
            self._known.sealed.clear()
        self._known.position = position
        self._acts.append(Record(position=position))


def _told(failed: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in failed.items())
