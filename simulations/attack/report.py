"""Results of the suite with several populations, as a table or as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from fedpriv.report.tables import Column, Table, cohort_text, print_table
from fedpriv.run.terminal import Display, displayed
from fedpriv.support.checks import epsilon_down, epsilon_up
from simulations.attack.certification import CONFIDENCE, largest_certifiable
from simulations.attack.populations import KeptPopulation
from simulations.attack.suite import AttackedPlan, Finding, attack, certifying


@dataclass(frozen=True)
class Report:
    """Results of an attack, for readers and programs."""

    name: str  # of the experiment
    target: AttackedPlan
    runs: int  # of each world
    findings: tuple[Finding, ...]

    @classmethod
    def of(
        cls, name: str, target: AttackedPlan, populations: Sequence[KeptPopulation], runs: int
    ) -> "Report":
        """Attack a target with each population; lines on stderr show the progress."""
        with displayed(Console(stderr=True)) as display:
            findings = [
                _find(
                    target,
                    population,
                    runs,
                    display,
                    f"{number} of {len(populations)}: {population.name}",
                )
                for number, population in enumerate(populations, 1)
            ]
        return cls(name, target, runs, tuple(findings))

    @property
    def refuted(self) -> bool:
        """True if any population refutes the ledger."""
        return any(finding.refuted for finding in self.findings)

    @property
    def ledger_epsilon(self) -> float:
        """ε of the events that a run charged, at most."""
        return max((finding.ledger_epsilon for finding in self.findings), default=0.0)

    @property
    def most(self) -> float:
        """The largest bound that this number of runs can certify, for any engine."""
        return largest_certifiable(certifying(self.runs), self.target.budget.delta)

    @property
    def table(self) -> Table:
        """One row for each population."""
        columns = [
            Column("population", "text"),
            Column("what it attacks", "text"),
            Column("ε ≥"),
            Column("ledger"),
            Column("best distinguisher", "text"),
            Column("verdict", "text"),
        ]
        plan = self.target.plan
        sampling = plan.sampling.event()
        return Table(
            f"{self.name}: {plan.rounds} rounds, {cohort_text(sampling)}, "
            f"z = {plan.noise_multiplier:.4g}, "
            f"δ = {self.target.budget.delta}; {self.runs:,} runs in each world",
            columns,
            [_row(finding) for finding in self.findings],
        )

    @property
    def content(self) -> Mapping[str, Any]:
        """The report as values of JSON."""
        plan = self.target.plan
        return {
            "experiment": self.name,
            "rounds": plan.rounds,
            "users": plan.sampling.population,
            "noise_multiplier": plan.noise_multiplier,
            "delta": self.target.budget.delta,
            "confidence": CONFIDENCE,
            "runs": self.runs,
            "most_certifiable": self.most,
            "refuted": self.refuted,
            "populations": [_content(finding) for finding in self.findings],
        }

    @property
    def remarks(self) -> Iterator[str]:
        """Remarks that a reader of the table needs."""
        yield (
            f"Each bound holds at {CONFIDENCE:.0%} confidence; {self.runs:,} runs certify at most "
            f"{epsilon_down(self.most)}, whatever they see."
        )
        if self.most <= self.ledger_epsilon < float("inf"):
            runs = self.runs
            while (
                largest_certifiable(certifying(runs), self.target.budget.delta)
                <= self.ledger_epsilon
            ):
                runs *= 2
            yield f"That cannot refute the ledger; --runs {runs} could."

    def print(self) -> None:
        """Print the table, its remarks, and refutations in red."""
        console = Console(highlight=False, markup=False, emoji=False)
        print_table(self.table, console)
        for remark in self.remarks:
            console.print(remark)
        for finding in self.findings:
            if finding.certificate and finding.refuted:
                console.print(
                    f"refuted: with population {finding.population.name}, ε is at least "
                    f"{epsilon_down(finding.certificate.epsilon)}, and the ledger says "
                    f"{epsilon_up(finding.ledger_epsilon)}",
                    style="red",
                )


def _find(
    target: AttackedPlan, population: KeptPopulation, runs: int, display: Display, name: str
) -> Finding:
    rounds, rounds_done = target.plan.rounds, 0
    line = display.add(name, total := (2 * runs + 1) * rounds)

    def show() -> None:
        nonlocal rounds_done
        rounds_done += rounds
        display.update(line, rounds_done)
        display.tell()

    finding = attack(target, population, runs, on_run=show)
    certificate = finding.certificate
    display.update(
        line, total, f"ε ≥ {epsilon_down(certificate.epsilon)}" if certificate else finding.verdict
    )
    return finding


def _row(finding: Finding) -> tuple[str, ...]:
    certificate, population = finding.certificate, finding.population
    if certificate is None:
        return population.name, population.attacks, "", "", "", finding.verdict
    bounds = epsilon_down(certificate.epsilon), epsilon_up(finding.ledger_epsilon)
    distinguisher = finding.distinguisher if certificate.epsilon else ""
    return population.name, population.attacks, *bounds, distinguisher, finding.verdict


def _content(finding: Finding) -> dict[str, object]:
    content: dict[str, object] = {
        "population": finding.population.name,
        "attacks": finding.population.attacks,
        "verdict": finding.verdict,
    }
    if (certificate := finding.certificate) is not None:
        content |= {"epsilon_low": certificate.epsilon, "ledger_epsilon": finding.ledger_epsilon}
        counts = {key: value for key, value in asdict(certificate).items() if key != "epsilon"}
        content |= {"distinguisher": finding.distinguisher, **counts}
    return content
