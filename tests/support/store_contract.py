"""What every store must do, whatever keeps it; subclassed per kind of database."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime

import pytest
import store_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tilescout.errors import UsageError
from tilescout.kernels.base import Config, ParameterValue
from tilescout.tuner.records import (
    BinaryFacts,
    Evaluation,
    MeasurementPolicy,
    Provenance,
    Timing,
    TrialStatus,
)
from tilescout.tuner.store import Store

_times = st.floats(0, 1e12, allow_nan=False)
_durations = st.floats(0, 1e9, allow_nan=False)
_counts = st.integers(0, 2**31 - 1)
_words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
_facts = st.builds(
    BinaryFacts, _words, *[_counts] * 6, _words, st.dictionaries(_words, _counts), _counts, _counts
)
_samples = st.lists(st.floats(0, 1e6, width=32), max_size=20).map(tuple)
_timings = st.builds(Timing, _times, _times, _times, _times, _times, _samples, _counts).map(
    lambda t: replace(t, num_samples=len(t.samples_us) or t.num_samples)
)
_errors = st.none() | st.floats(allow_nan=False)
_values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | _words
_evaluations = st.builds(
    Evaluation,
    st.dictionaries(_words, _values).map(lambda values: Config.of("triton", values)),
    st.sampled_from(TrialStatus),
    st.just(Provenance.MEASURED),
    _words,
    _timings,
    st.lists(_facts, max_size=3).map(tuple),
    _errors,
    _errors,
    _durations,
    _durations,
)


@pytest.mark.usefixtures("toy")
class StoreContract:
    """Tests over the fixture ``store``, an empty database open for writing."""

    def test_study_is_created_once_and_keeps_its_first_seed(self, store: Store) -> None:
        first = store.study(cases.study_key(), seed=7)
        again = store.study(cases.study_key(), seed=8)
        assert first == again
        assert (again.seed, again.num_trials) == (7, 0)
        assert store.studies() == [first]

    @pytest.mark.parametrize(
        "other",
        [
            cases.study_key(2048),
            cases.study_key(provenance=Provenance.PREDICTED),
            cases.study_key(policy=MeasurementPolicy(is_cold_l2=False)),
            cases.study_key(policy=MeasurementPolicy(is_cuda_graph=False)),
            cases.study_key(toolchain=replace(cases.TOOLCHAIN, driver="")),
            cases.study_key(device=replace(cases.DEVICE, sku="h20", num_sms=78)),
            replace(cases.study_key(), space_fingerprint="other"),
            replace(cases.study_key(), template_hashes=(("triton", "hash-c"),)),
        ],
        ids=["problem", "provenance", "l2", "graph", "driver", "device", "space", "template"],
    )
    def test_any_part_of_the_key_makes_another_study(self, store: Store, other) -> None:
        first = store.study(cases.study_key(), seed=0)
        second = store.study(other, seed=0)
        assert first.study_id != second.study_id
        assert [study.key for study in store.studies()] == [cases.study_key(), other]

    def test_every_status_comes_back_exactly(self, store: Store) -> None:
        study = store.study(cases.study_key(), seed=0)
        evaluations = [cases.measured(0)]
        evaluations += [cases.failed(i, status) for i, status in enumerate(TrialStatus, start=1)]
        evaluations[1] = cases.measured(1, template="tilelang")
        added = [store.add_trial(study.study_id, evaluation) for evaluation in evaluations]
        assert store.trials(study.study_id) == added
        expected = [cases.without_samples(evaluation) for evaluation in evaluations]
        assert [trial.evaluation for trial in added] == expected
        assert [trial.number for trial in added] == list(range(len(evaluations)))
        assert store.study(cases.study_key(), seed=0).num_trials == len(evaluations)
        assert store.damaged_rows == ()

    def test_any_evaluation_comes_back_exactly(self, store: Store) -> None:
        study = store.study(cases.study_key(), seed=0)

        @settings(max_examples=60, deadline=None)
        @given(_evaluations)
        def round_trips(evaluation: Evaluation) -> None:
            added = store.add_trial(study.study_id, evaluation)
            (read,) = [t for t in store.trials(study.study_id) if t.number == added.number]
            assert read == added
            if added.evaluation.config not in seen:
                assert added.evaluation == cases.without_samples(evaluation)
            seen.add(added.evaluation.config)

        seen: set[Config] = set()
        round_trips()

    @pytest.mark.parametrize("size", [math.nan, math.inf, -math.inf], ids=str)
    def test_errors_that_are_no_finite_number_come_back(self, store: Store, size: float) -> None:
        study = store.study(cases.study_key(), seed=0)
        evaluation = replace(
            cases.failed(1, TrialStatus.INCORRECT), max_abs_error=size, relative_rms_error=size
        )
        store.add_trial(study.study_id, evaluation)
        (trial,) = store.trials(study.study_id)
        assert str(trial.evaluation.max_abs_error) == str(size)
        assert str(trial.evaluation.relative_rms_error) == str(size)

    def test_a_reason_may_hold_any_byte(self, store: Store) -> None:
        study = store.study(cases.study_key(), seed=0)
        failed = cases.failed(1, TrialStatus.COMPILE_ERROR)
        added = store.add_trial(study.study_id, replace(failed, reason="ptxas: \0\udc80 bad"))
        assert added.evaluation.reason == "ptxas: ? bad"
        assert store.trials(study.study_id) == [added]

    def test_the_same_config_again_changes_nothing(self, store: Store) -> None:
        study = store.study(cases.study_key(), seed=0)
        first = store.add_trial(study.study_id, cases.measured(1, 10.0))
        again = store.add_trial(study.study_id, cases.measured(1, 20.0))
        assert again == first
        assert store.trials(study.study_id) == [first]

    def test_numbers_count_within_a_study(self, store: Store) -> None:
        one = store.study(cases.study_key(1), seed=0).study_id
        two = store.study(cases.study_key(2), seed=0).study_id
        numbers = [
            store.add_trial(study_id, cases.measured(index)).number
            for study_id, index in [(one, 0), (two, 0), (one, 1), (two, 5)]
        ]
        assert numbers == [0, 0, 1, 1]

    def test_decide_keeps_final_times_and_samples(self, store: Store) -> None:
        study = store.study(cases.study_key(), seed=0)
        trials = store.add_trials(study.study_id, [cases.measured(i) for i in range(4)])
        finals = [cases.measured(2, 9.5), cases.measured(0, 9.75)]
        winner = store.decide(study.study_id, finals)
        assert winner.finals == (trials[2].trial_id, trials[0].trial_id)
        assert winner.trial.trial_id == trials[2].trial_id
        assert winner.study.key == cases.study_key()
        assert store.winners() == [winner]
        kept = winner.trial.evaluation.timing
        assert kept is not None
        assert finals[0].timing is not None
        assert kept.samples_us == pytest.approx(finals[0].timing.samples_us, rel=1e-7)
        assert replace(kept, samples_us=()) == cases.without_samples(finals[0]).timing
        after = store.trials(study.study_id)
        assert after[2] == winner.trial
        assert after[1] == trials[1]
        assert after[3] == trials[3]
        read = store.trials_by_study([study.study_id], with_samples=False)[study.study_id]
        assert [t.evaluation for t in read] == [cases.without_samples(t.evaluation) for t in after]

    def test_a_final_that_fails_is_no_longer_ok(self, store: Store) -> None:
        study = store.study(cases.study_key(), seed=0)
        store.add_trials(study.study_id, [cases.measured(0), cases.measured(1)])
        store.decide(study.study_id, [cases.measured(1), cases.failed(0, TrialStatus.UNREPEATABLE)])
        loser = store.trials(study.study_id)[0].evaluation
        assert loser.status is TrialStatus.UNREPEATABLE
        assert loser.timing is None
        assert loser.facts == cases.measured(0).facts

    @pytest.mark.parametrize(
        "values",
        [{}, {"block_n": 2**62, "is_on": False, "is_wide": True, "rule": 'a "b"\\\N{MICRO SIGN}s'}],
        ids=["empty", "every type"],
    )
    def test_the_view_holds_the_config(
        self, store: Store, values: dict[str, ParameterValue]
    ) -> None:
        study_id = store.study(cases.study_key(), seed=0).study_id
        evaluation = replace(cases.measured(1, 12.5), config=Config.of("triton", values))
        store.add_trial(study_id, evaluation)
        winner = store.decide(study_id, [evaluation])
        with store.reading() as reader:
            row = reader._connection.exec_driver_sql(
                "SELECT parameters, config_values, time_us, decided_at FROM dispatch_winners"
            ).one()
        names, parts = json.loads(row.parameters), json.loads(row.config_values)
        found = dict(zip(names, parts, strict=True))
        assert found == values
        assert [type(value) for value in found.values()] == [type(v) for v in values.values()]
        assert float(row.time_us) == 12.5
        assert datetime.fromisoformat(row.decided_at) == winner.decided_at

    def test_finals_of_which_none_is_ok(self, store: Store) -> None:
        study_id = store.study(cases.study_key(), seed=0).study_id
        store.add_trials(study_id, [cases.measured(i) for i in range(3)])
        store.decide(study_id, [cases.measured(0)])
        failing = [cases.failed(i, TrialStatus.UNREPEATABLE) for i in (1, 0)]
        assert store.record_finals(study_id, failing) is None
        assert store.winners() == []
        fates = [trial.evaluation.status for trial in store.trials(study_id)]
        assert fates == [TrialStatus.UNREPEATABLE, TrialStatus.UNREPEATABLE, TrialStatus.OK]
        assert store.rebuild_winners() == 0
        winner = store.record_finals(study_id, [cases.measured(2), *failing])
        assert winner is not None
        assert store.winners() == [winner]
        assert winner.finals == tuple(store.trials(study_id)[i].trial_id for i in (2, 1, 0))

    def test_refuses_finals_that_are_not_in_order(self, store: Store) -> None:
        study_id = store.study(cases.study_key(), seed=0).study_id
        store.add_trials(study_id, [cases.measured(0), cases.measured(1)])
        late = [cases.failed(0, TrialStatus.CRASHED), cases.measured(1)]
        for finals, message in [([], "are missing"), (late, "must begin with those that are ok")]:
            with pytest.raises(UsageError, match=message):
                store.record_finals(study_id, finals)
        assert all(t.evaluation.status is TrialStatus.OK for t in store.trials(study_id))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("median_us", 1.1e12), ("median_us", -1.0), ("p90_us", math.inf), ("ci_low_us", math.nan)],
    )
    def test_refuses_a_time_that_it_cannot_keep(
        self, store: Store, name: str, value: float
    ) -> None:
        study_id = store.study(cases.study_key(), seed=0).study_id
        evaluation = replace(cases.measured(1), timing=replace(cases.timing(1.0), **{name: value}))
        with pytest.raises(UsageError, match=f"timing.{name}=.* microseconds from 0 to 1e.12"):
            store.add_trial(study_id, evaluation)
        with pytest.raises(
            UsageError, match=r"compile_s=10{10}.0 must be .* seconds from 0 to 1e.09"
        ):
            store.add_trial(study_id, replace(cases.measured(1), compile_s=1e10))

    def test_deciding_again_replaces_the_decision(self, store: Store) -> None:
        study = store.study(cases.study_key(), seed=0)
        trials = store.add_trials(study.study_id, [cases.measured(i) for i in range(3)])
        store.decide(study.study_id, [cases.measured(0), cases.measured(1)])
        winner = store.decide(study.study_id, [cases.measured(2)])
        assert store.winners() == [winner]
        assert winner.finals == (trials[2].trial_id,)

    def test_a_prediction_has_neither_spread_nor_samples(self, store: Store) -> None:
        study = store.study(cases.study_key(provenance=Provenance.PREDICTED), seed=0)
        evaluation = cases.predicted(1, 12.345678901234567)
        store.add_trial(study.study_id, evaluation)
        winner = store.decide(study.study_id, [evaluation])
        assert winner.trial.evaluation == cases.rounded(evaluation)
        assert winner.study.key.provenance is Provenance.PREDICTED

    def test_filters_by_operation_and_sku(self, store: Store) -> None:
        for sku in ("h100", "h200", "b200"):
            key = cases.study_key(device=replace(cases.DEVICE, sku=sku))
            study_id = store.study(key, seed=0).study_id
            store.add_trial(study_id, cases.measured(0))
            store.decide(study_id, [cases.measured(0)])
        assert [w.study.key.device.sku for w in store.winners(skus=["b200", "h100"])] == [
            "h100",
            "b200",
        ]
        assert len(store.winners(op="toy")) == len(store.studies(op="toy")) == 3
        assert store.winners(op="other") == store.studies(op="other") == []
        assert store.studies(skus=[]) == []

    def test_winners_can_be_rebuilt_from_trials(self, store: Store) -> None:
        for size in (1, 2, 3):
            study_id = store.study(cases.study_key(size), seed=0).study_id
            store.add_trials(study_id, [cases.measured(i) for i in range(3)])
            if size < 3:
                store.decide(study_id, [cases.measured(size), cases.measured(0)])
        winners = store.winners()
        assert store.rebuild_winners() == 0
        assert store.winners() == winners
        _forget_and_falsify(store, winners[0].study.study_id, winners[1].study.study_id)
        assert store.rebuild_winners() == 2
        rebuilt = store.winners()
        assert {(w.study.study_id, w.trial.trial_id, w.finals) for w in rebuilt} == {
            (w.study.study_id, w.trial.trial_id, w.finals) for w in winners
        }

    def test_refuses_what_does_not_belong_in_the_study(self, store: Store) -> None:
        study_id = store.study(cases.study_key(), seed=0).study_id
        stray = Config.of("cuda", {"block_n": 1})
        for evaluation, message in [
            (cases.predicted(1, 5.0), "a predicted trial does not belong in study"),
            (replace(cases.measured(1), config=stray), "template 'cuda' takes no part"),
            (replace(cases.measured(1), timing=None), "is ok but has no timing"),
            (replace(cases.measured(1), timing=replace(cases.timing(1.0), p10_us=math.nan)), "p10"),
        ]:
            with pytest.raises(UsageError, match=message):
                store.add_trial(study_id, evaluation)
        with pytest.raises(UsageError, match="there is no study 999"):
            store.add_trial(999, cases.measured(1))
        assert store.trials(study_id) == []

    def test_refuses_decisions_without_a_verified_winner(self, store: Store) -> None:
        study_id = store.study(cases.study_key(), seed=0).study_id
        store.add_trials(study_id, [cases.measured(0), cases.measured(1)])
        for finals, message in [
            ([], "is missing: it must be ok"),
            ([cases.failed(0, TrialStatus.CRASHED)], "is crashed: it must be ok"),
            ([cases.measured(0), cases.measured(5)], "is no trial of study"),
            ([cases.measured(0), cases.measured(0)], "name a config twice"),
        ]:
            with pytest.raises(UsageError, match=message):
                store.decide(study_id, finals)
        assert store.winners() == []
        assert all(
            t.evaluation.timing and not t.evaluation.timing.samples_us
            for t in store.trials(study_id)
        )


def _forget_and_falsify(store: Store, forgotten: int, falsified: int) -> None:
    """Deletes one decision and turns another into a trial that did not win."""
    from sqlalchemy import delete, update
    from tilescout.tuner.store.models import WinnerRow

    loser = store.trials(falsified)[0].trial_id
    with store.reading() as reader:
        connection = reader._connection
        connection.execute(delete(WinnerRow).where(WinnerRow.study_id == forgotten))
        connection.execute(
            update(WinnerRow).where(WinnerRow.study_id == falsified).values(trial_id=loser)
        )
        connection.commit()
