"""The letter of an answer to a multiple-choice question: what a reader takes each text to say."""

import pytest

from moetrain.rl.envs.letters import letter_alone, letter_of


@pytest.mark.parametrize(
    "text", ["A", "(A)", "A.", "A)", "[A]", "**A**", "$A$", r"\text{(A)}", " A\n"]
)
def test_letter_alone_finds_a_letter_in_its_marks(text):
    assert letter_alone(text) == "A"


@pytest.mark.parametrize("text", ["", "a", "7", "AB", "A B", "A) 12", "I am", r"A^2", r"\alpha"])
def test_letter_alone_is_of_a_whole_text(text):
    assert letter_alone(text) is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A", "A"),
        ("(A)", "A"),
        ("**A**", "A"),
        ("**A.**", "A"),
        ("$A$", "A"),
        (r"\(A\)", "A"),
        (r"\text{A}", "A"),
        ("A) 12", "A"),
        ("(B) 12", "B"),
        ("I) x", "I"),
        ("I) a dog", "I"),
        ("A. The sum", "A"),
        ("The answer is A.", "A"),
        ("The answer is (A)", "A"),
        ("The answer is A because it fits.", "A"),
        ("The answer is B because vitamin C is an acid.", "B"),
        ("The answer is A: it has vitamin C", "A"),
        ("The correct answer is option (B): it fits.", "B"),
        ("The final answer is D. I hope it is correct.", "D"),
        ("I would choose B here, since it fits.", "B"),
        ("The answer is clearly C", "C"),
        ("Answer: A", "A"),
        ("**Answer:** A", "A"),
        ("**Answer**: (B)", "B"),
        ("(C) is correct.", "C"),
        ("C is the right answer, as shown.", "C"),
        ("Let us see.\n\nB", "B"),
        ("B\nThis is the sum of both.", "B"),
        (r"\boxed{A}", "A"),
        (r"So $\boxed{\text{(A)}}$. It follows from B", "A"),
        (r"The answer is $\boxed{\textbf{(E)}\ 12}$", "E"),
        ("Options: A) 1, B) 2. Therefore, the answer is: B. It fits.", "B"),
        ("A) 1\nB) 2\nC) 3\nThe answer is B) 2.", "B"),
        ("<think>So A.</think>\nIt is (B).", "B"),
        # The end of a text tells what was meant.
        ("I think (A) is wrong, so (B)", "B"),
        ("The answer is A. No wait, it is B.", "B"),
        ("The answer is A. No, B.", "B"),
        ("The answer is not A but B.", "B"),
        # Letters that a text rejects do not count.
        ("The answer is (B), not (A).", "B"),
        ("The answer is (B). Option (A) is wrong because it doubles.", "B"),
        ("Option A is wrong and option B is too large. The answer is D, as it fits.", "D"),
    ],
)
def test_letter_of_finds_what_a_text_names(text, letter):
    assert letter_of(text) == letter


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12",
        "A good idea: the answer is 12.",
        "The answer is A number of things.",
        "The answer is a number.",
        "I think it is 12",
        "Point A is on the line.",
        "It has vitamin C",
        "Let $A = 3$ and $B = 4$, so 7",
        "Option A doubles it, and option B halves it.",
        "The answer isn't A, since it doubles.",
        "It isn't A.",
        "A) 1\nB) 2",
        "A" * 50,
    ],
)
def test_letter_of_a_text_that_names_none_is_none(text):
    assert letter_of(text) is None
