"""Asking a survey: draw, collect, charge, release, answer."""

from dataclasses import dataclass

from fedpriv.accounting.ledger import Charge
from fedpriv.analytics.collecting import collect
from fedpriv.analytics.question import Answer
from fedpriv.analytics.survey import Survey
from fedpriv.data.store import UserStore
from fedpriv.errors import InvalidValueError, LedgerError, known_names
from fedpriv.federated.aggregate import add_up
from fedpriv.federated.books import Books
from fedpriv.privacy.contribution import IntegerVector
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.layout import FloatVector


@dataclass(frozen=True, eq=False)
class Answers:
    """What one survey released; safe to show.

    Attributes:
        answers: one per question, in their order.
        attempt: which attempt at the round succeeded, from 0.
        charge_hash: hash of the round's row in the ledger.
    """

    answers: tuple[Answer, ...]
    attempt: int
    charge_hash: str

    def __getitem__(self, question: str) -> Answer:
        """The answer to the question of this name.

        Raises:
            InvalidValueError: there is none.
        """
        by_name = {answer.question: answer for answer in self.answers}
        if question not in by_name:
            raise InvalidValueError(
                f"nobody asked question {question!r}; {known_names(question, by_name)}"
            )
        return by_name[question]


def ask(survey: Survey, users: UserStore, books: Books, entropy: Entropy) -> Answers:
    """Ask the users and release the noised answers.

    Guarantees:

    * one charge is durable in the ledger before any noise is drawn, and covers all answers;
    * one user more or less moves the sums of all questions, each divided by its σ, by at most 1/z
      together (McMahan et al. 2018, equation (1));
    * who took part is recorded, and committed to by the charge;
    * where the budget would be passed, nobody is asked, nothing is charged and nothing released;
    * an empty cohort is charged and answered like any other;
    * asking again, for one that was interrupted or one more, is a new attempt at the round: fresh
      cohort, fresh noise and a new charge.

    Args:
        survey: what is asked.
        users: data of all enrolled users.
        books: ledger, participation record and budget.
        entropy: where cohort and noise come from.

    Raises:
        BudgetExceededError: asking would pass the budget.
        DataError: the users' columns do not fit the questions.
        InvalidValueError: there are not as many users as are enrolled.
        LedgerError: the ledger or the record cannot be believed or written; nothing is released.
    """
    survey.check(users)
    books.refuse_if_beyond(survey.event, f"run {survey.run}, round {survey.round}")
    attempt = books.next_attempt(survey.run, survey.round)
    cohort = survey.mechanism.draw_cohort(entropy, _purpose("sampling", survey, attempt))
    commitment = books.record(survey.run, survey.round, attempt, cohort)
    clipping = survey.mechanism.average.sum_query.clipping
    total = add_up(collect(survey, users, cohort), clipping, cohort.size).total
    charge = books.charge(
        survey.run, survey.round, attempt, commitment, survey.event, entropy.randomness
    )
    average = _released(survey, total, charge, entropy)
    return Answers(survey.answers(average), attempt, charge.hash)


def _released(
    survey: Survey, total: IntegerVector, charge: Charge, entropy: Entropy
) -> FloatVector:
    """Noise the total [D] once and average it, if that is what was charged."""
    charged = charge.redeem()
    if charged != survey.event:
        raise LedgerError(f"the event charged is {charged}, not {survey.event}")
    purpose = _purpose("noise", survey, charge.attempt)
    average, realised = survey.mechanism.release(total, entropy, purpose)
    if realised != charged:
        raise LedgerError(f"the event realised is {realised}, not the one charged, {charged}")
    return average


def _purpose(stream: str, survey: Survey, attempt: int) -> str:
    return f"{stream}/{survey.run}/{survey.round}/{attempt}"
