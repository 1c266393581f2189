# ruff: noqa: RUF001  full-width characters are what is tested
"""The final answer of a text: what a reader takes each text to say, and what libraries find."""

import random

import pytest

from moetrain.rl.envs.final_answers import final_answer, readable
from moetrain.rl.envs.letters import letter_of
from moetrain.rl.envs.mathematics import MathReward

FORMS_OF_NUMBERS = [
    "<answer>{}</answer>",
    "<answer>\n{}\n</answer>",
    "<think>So 3, or 5.</think><answer>{}</answer>",
    "<think>\\boxed{{3}}?</think>\n\n<answer>It is {}.</answer> Check: 5",
    "<answer>${}$</answer>",
    "<answer>\\boxed{{{}}}</answer>",
    "<ANSWER>{}</ANSWER>",
    "<answer>{}",  # `</answer>` is the stop text
    "{}</answer>",  # `<answer>` ends the prompt
    "<answer>5</answer> No: <answer>{}</answer>",
    "<answer></answer> It is {}",
    "<think>3</think> The answer is {}.",
    "<think>The answer is {}.</think>",
    "<final_answer>{}</final_answer>",
    "<b>{}</b>",
    "So it is <strong><i>{}</i></strong>.",
    "Answer:{}",
    "**Answer:{}**",
    "3 + 4 = 7. Answer:{}",
    "`{}`",
    "So it is `{}`.",
    '"{}"',
    "“{}”",
    "'{}'",
    "({})",
    "So it is ({}).",
    "[{}]",
    "*{}*",
    "_{}_",
    "**{}**",
    "####{}",
    "3 + 4 = 7\n####{}",
    "So →{}",
    "答案是{}",
    "答案是{}。",
    "答案：{}",
    "答案：{}。",
    "首先 3 + 4 = 7，所以答案是{}，因为有 3 个。",
    "答案为**{}**",
    "答案是${}$，共 3 个。",
    "所以一共有{}个苹果。",
    "答えは{}です。",
    "정답은 {}입니다.",
    "정답은{}",
    "คำตอบคือ{}",
    '{{"answer": "{}"}}',
    "【答案】{}",
    "【解析】共 3 个。\n【答案】：{}。",
]
FORMS_OF_LETTERS = [
    "<answer>{}</answer>",
    "<answer>({})</answer>",
    "<answer>\n{}\n</answer>",
    "<think>So B, or (D).</think><answer>{}</answer>",
    "<answer>The answer is {}.</answer> Not E.",
    "<answer>\\boxed{{{}}}</answer>",
    "<answer>{}",
    "{}</answer>",
    "<b>{}</b>",
    "`{}`",
    "答案是{}",
    "答案是 {}",
    "答案是{}。",
    "答案：{}",
    "答案为({})",
    "正确答案是({})",
    "正确答案是**{}**，因为 D 太大。",
    "正确的选项是{}。",
    "故选{}。",
    "故选：{}",
    "因此选择{}。",
    "所以应选（{}）。",
    "选{}",
    "本题选{}。",
    "答案选{}",
    "排除 D，答案{}",
    "{}选项正确。",
    "{}是正确答案，因为 D 太大。",
    "答えは{}です。",
    "정답은 {}입니다.",
    "La respuesta es {}.",
    "La respuesta correcta es la opción {}, porque sí.",
    "Die Antwort ist {}",
    "Die richtige Antwort ist {}, weil es passt.",
    "La réponse est {}, car oui.",
    "La risposta corretta è {}.",
    "A resposta é ({}), pois sim.",
    "Ответ: {}",
    "{}) x",
    "{}) b = 3",
    "{}) a dog",
    "**{}) a dog**",
    "【答案】{}",
    "【答案】{}。",
    "【解析】不是 D。\n【答案】（{}）",
    "{}、12",
    "{}选项",
    "{}选项。",
    "选{}选项",
]


@pytest.fixture(scope="module")
def reward():
    return MathReward(pytest.importorskip("math_verify"))


@pytest.mark.parametrize("form", FORMS_OF_NUMBERS)
def test_a_number_earns_its_reward_in_each_form_and_no_other_does(reward, form):
    """The number alone is right. Others, of random digits too, are wrong in the same form."""
    drawn = random.Random(form)
    for right in ("12", "-4", "0.5", "3/4"):
        assert reward({"answer": right}, form.format(right)) == 1
        wrong = {str(drawn.randint(-2000, 2000)) for _ in range(3)} - {right}
        for other in (*wrong, f"{right}1", f"1{right.strip('-')}", "1,024", "3", "4", "7"):
            assert reward({"answer": right}, form.format(other)) == 0, other


@pytest.mark.parametrize("form", FORMS_OF_LETTERS)
def test_a_letter_earns_its_reward_in_each_form_and_no_other_does(reward, form):
    for right in "ACJ":
        for said in "ABCDEJ":
            assert letter_of(form.format(said)) == said
            assert reward({"answer": right}, form.format(said)) == (said == right)


@pytest.mark.parametrize(
    ("right", "text", "expected"),
    [
        # Values in thoughts, or before the tags, are no answers.
        ("3", "<think>3</think><answer>12</answer>", 0),
        ("3", r"<think>\boxed{3}</think>It is 12.", 0),
        ("12", "It is 12. <answer>13</answer>", 0),
        ("12", "<answer>12</answer><answer>13</answer>", 0),
        ("12", "<think>12</think> I do not know.", 0),
        ("A", "<think>A</think><answer>B</answer>", 0),
        # Spaces do not split what belongs together.
        ("12", "x>12", 0),
        ("12", "5:12", 0),
        ("12", "12:30", 0),
        ("2:5", "<answer>12:30</answer>", 1),
        # A final answer of numbers and signs counts whole, and its last number alone does not.
        ("3", "1, 2, 3", 0),
        ("13", "<answer>12, 13</answer>", 0),
        ("13", "<answer>12 or 13</answer>", 0),
        ("13", "12, or 13", 0),
        ("1,2,3", "<answer>1, 2, 3</answer>", 1),
        ("1,2,3", "<answer>3, 1 and 2</answer>", 1),
        ("1,2,3", "<answer>1, 2</answer>", 0),
        ("(0,1]", "<answer>(0, 1]</answer>", 1),
        ("(0,1]", "<answer>[0, 1]</answer>", 0),
        ("12.5", "12,5", 1),
        ("5", "12,5", 0),
        ("1024", "1,024", 1),
        ("1024", "1 024", 1),
        ("7", "3 + 4 = 7", 1),
        ("4", "3 + 4 = 7", 0),
        ("12", "12!", 1),
        ("12", "12%", 1),
        ("12", "x_12_", 0),
        ("24", "2 *3* 4", 1),  # a product
        ("3", "2 *3* 4", 0),
        ("10", "2<sup>10</sup>", 0),
        ("3", "答案是3万", 0),
        ("12", "答案不是12", 0),
        ("36", "It is 3 * (12)", 1),
        ("12", "It is 3 * (12)", 0),
        ("14", "(3+4)*2", 1),
        ("12", "f(12)", 0),
        ("12", "(12, 13)", 0),
        ("(12, 13)", "<answer>(12, 13)</answer>", 1),
        (r"\frac{1}{2}", r"<answer>\frac{1}{2}</answer>", 1),
        ("[2,5)", r"<answer>$[2,5)$</answer>", 1),
        ("12", '{"answer": 12}', 1),
        ("13", '{"answer": 12}', 0),
        ("8", "2**3 = 8", 1),
        ("8", "**2**3 = 8", 1),
        ("36", "3 * 4 * 3", 1),
        ("12", "The answer is 12 [1].", 1),
        ("12", "答案是12个，第3题", 1),
        ("3", "答案是12个，第3题", 0),
        ("12", "１２", 1),
        ("12", "x＝12", 1),
        ("-12", "It is \u221212.", 1),
        ("12", "It is \u221212.", 0),
        ("7", "x\u00b2 = 7", 1),
        # Several letters are none.
        *(("A", text, 0) for text in (r"\boxed{A, B, C, D}", r"\boxed{A, B}", "A and B")),
        *(("B", text, 0) for text in (r"\boxed{A, B, C, D}", r"\boxed{A, B}", "A and B")),
        *(("A", f"The answer is {text}", 0) for text in ("A, B, C or D", "A or B", "(A), (B)")),
        *(("D", f"The answer is {text}", 0) for text in ("A, B, C or D", "A or D", "A/D")),
        ("A", "Either A or B is correct.", 0),
        ("B", "Either A or B is correct.", 0),
        ("A", "answer: A or maybe B", 0),
        ("A", "答案是A、B", 0),
        ("B", "选A或者B", 0),
        ("B", "答案是A或B", 0),
        ("A", "<answer>A, B</answer>", 0),
        ("A", "La respuesta es A o B.", 0),
        # But sentences about other letters are no list.
        ("B", "The answer is B, A is too small.", 1),
        ("B", "The answer is B, and A is wrong.", 1),
        ("B", "The answer is B, and A doubles it.", 1),
        ("B", "A, C and D are wrong. The answer is B.", 1),
        ("A", r"\boxed{A}, \boxed{A}", 1),
        # A letter that the text denies does not count.
        ("A", "答案不是A", 0),
        ("A", "不应选A", 0),
        ("A", "不能选择A", 0),
        ("A", "A选项不正确", 0),
        ("A", "选项A错误，选B", 0),
        ("B", "选项A错误，选B", 1),
        ("A", "故选A错误", 0),
        ("A", "La respuesta no es A.", 0),
        ("A", "La respuesta no es A, sino B.", 0),
        ("A", "Die Antwort ist nicht A.", 0),
        ("A", "La réponse n'est pas A.", 0),
        ("A", "La risposta non è A, ma B.", 0),
        ("A", "A resposta não é A.", 0),
        ("C", "维生素C", 0),
        ("C", "排除C选项", 0),
        ("C", "C选项错误", 0),
        ("A", "A、B", 0),
        ("A", "A) x\nB) y", 0),
        # AMC's answers have the letter and the value.
        *((r"\textbf{(B)}\ 12", text, 1) for text in (r"\boxed{\textbf{(B)}\ 12}", r"\boxed{B}")),
        *(
            (r"\textbf{(B)}\ 12", text, 1)
            for text in ("(B)", "The answer is B.", r"\boxed{12}", "12")
        ),
        *((r"\textbf{(B)}\ 12", text, 0) for text in (r"\boxed{\textbf{(C)}\ 12}", r"\boxed{C}")),
        *((r"\textbf{(B)}\ 12", text, 0) for text in ("(C)", "The answer is C.", r"\boxed{13}")),
        (r"\text{(B)}\quad\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"\text{(B)}\quad\frac{1}{2}", r"\boxed{2}", 0),
        ("A", "a", 0),
        # Words: alone, in a box or tags, and behind "answer is".
        *(("True", text, 1) for text in ("True", "true.", "**True**", r"\boxed{True}")),
        *(("True", f"<answer>{text}</answer>", 1) for text in ("True", "\nTrue\n", '"True"')),
        *(("True", text, 1) for text in ("The answer is True.", "So.\nAnswer: **True**")),
        *(("True", text, 0) for text in ("False", r"\boxed{False}", "<answer>False</answer>")),
        *(("True", f"The answer is {text}.", 0) for text in ("False", "not True", "True or False")),
        ("True", r"True? No: \boxed{False}", 0),
        ("True", "It is True.", 0),
        ("yes", r"\boxed{\text{Yes}}", 1),
        ("yes", r"\boxed{\text{No}}", 0),
        (r"\text{Evelyn}", "The answer is Evelyn.", 1),
        (r"\text{Evelyn}", "<think>Bob?</think><answer>Evelyn</answer>", 1),
        (r"\text{Evelyn}", r"\boxed{\text{Bob}}", 0),
        (r"\text{Evelyn}", "The answer is Bob, not Evelyn.", 0),
        ("New York", r"\boxed{\text{New  York}}", 1),
        ("New York", "York", 0),
        ("proof", "no proof", 0),
    ],
)
def test_rewards_are_those_that_a_reader_gives(reward, right, text, expected):
    assert reward({"answer": right}, text) == expected


MATRICES = [
    # Each with others of the same form that are wrong.
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        (r"\begin{pmatrix} 5 \\ 2 \end{pmatrix}", "2", "1,2"),
    ),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", (r"\begin{pmatrix}2\\1\end{pmatrix}", "2", "12")),
    ("\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}", (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", "2")),
    (
        r"\begin{pmatrix} 1 \\[2pt] 2 \end{pmatrix}",
        (r"\begin{pmatrix} 2 \\[2pt] 2 \end{pmatrix}", "2"),
    ),
    (
        r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}",
        (r"\begin{pmatrix} 1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", r"\frac53", "3"),
    ),
    (
        r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
        (r"\begin{bmatrix} 1 & 3 \\ 2 & 4 \end{bmatrix}", "4"),
    ),
    (
        r"\left( \begin{array}{ccc} 1 & 0 & 2 \end{array} \right)",
        (r"\left( \begin{array}{ccc} 1 & 1 & 2 \end{array} \right)", "2"),
    ),
    (
        r"\left(\begin{matrix} 1 & 0 \\ 0 & 1 \end{matrix}\right)",
        (r"\left(\begin{matrix} 0 & 1 \\ 1 & 0 \end{matrix}\right)", "1"),
    ),
    (
        r"A = \begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        (r"A = \begin{pmatrix} 7 \\ 2 \end{pmatrix}", "2", "A = 2"),
    ),
    (r"\begin{pmatrix} x \\ y \end{pmatrix}", (r"\begin{pmatrix} y \\ x \end{pmatrix}", "y")),
    (r"\begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}", ("4", "2")),
    (
        r"\begin{cases} x=1 \\ y=2 \end{cases}",
        (r"\begin{cases} x=3 \\ y=2 \end{cases}", "2", "y=2"),
    ),
    (
        r"\begin{aligned} x&=1 \\ y&=2 \end{aligned}",
        ("2", r"\begin{aligned} x&=3 \\ y&=2 \end{aligned}"),
    ),
]
"""Matrices, vectors and systems of equations as MATH writes them, without any marks."""


@pytest.mark.parametrize(("right", "wrong"), MATRICES)
def test_a_matrix_counts_whole(reward, right, wrong):
    """math-verify takes the last number of a matrix without marks, and so paid `2` for a vector."""
    for form in (r"\boxed{%s}", "So $%s$.", r"\[ %s \]", "%s"):
        for gold in (right, f"${right}$"):
            assert reward({"answer": gold}, form % right) == 1
            for text in wrong:
                assert reward({"answer": gold}, form % text) == 0, text
    if "matrix" in right and "A =" not in right:  # the judge
        library = pytest.importorskip("math_verify")
        gold = library.parse(rf"\boxed{{{right}}}")
        assert library.verify(gold, library.parse(rf"\boxed{{{right}}}"))
        assert not library.verify(gold, library.parse(rf"\boxed{{{wrong[0]}}}"))


SAME_TEXTS = [
    # Each with texts that say the same, and with others that do not.
    (
        r"\left\{ \begin{array}{l} x=1 \\ y=2 \end{array} \right.",
        (r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.",),
        (r"\left\{ \begin{array}{l} x=3 \\ y=2 \end{array} \right.", "2"),
    ),
    (
        "9:30 a.m.",
        (r"9:30\text{ a.m.}", "9:30 a.m", "9:30  a.m."),
        ("9", "30", "9:30 p.m.", "8:30 a.m."),
    ),
    ("7:00 PM", (r"7:00 \text{ PM}", r"7:00\ PM"), ("7", "0", "8:00 PM", "7:00 AM", "0:00 PM")),
    (
        "10^-4 eV",
        (r"10^{-4}\text{ eV}", r"10^{-4}\ \mathrm{eV}", "10^{-4} eV", "10^{-4}"),
        ("10", "4", "10^-8 eV", r"10^{-8}\text{ eV}", "10^{-8}"),
    ),
    (
        "5 cm^2",
        (r"5\text{ cm}^2", r"5\,\mathrm{cm}^{2}", "5 cm²"),
        ("2", "25", "6 cm^2", r"5\text{ mm}^2"),
    ),
    ("5 cm²", (r"5\text{ cm}^2", "5 cm^2"), ("2", "25", "6 cm²", r"6\text{ cm}^2")),
    ("3√2", (r"3\sqrt{2}", r"\sqrt{18}", "3√(2)"), ("3", "2", "2√3", r"2\sqrt{3}")),
    ("(-∞, √3)", (r"(-\infty, \sqrt{3})",), ("(-∞, √2)", "3")),
    (".5", ("0.5", r"\frac{1}{2}"), ("5", ".05")),
    ("12", ("12.0", r"12\,"), ("1 2", r"1\ 2", r"1\,2", "2")),
    ("x_1 + 2", ("x_1+2",), ("x_1 + 3", "2")),
    (r"f(x) = x²", ("f(x)=x^2", "f(x) = x^{2}"), ("f(x) = x³", "2")),
]


@pytest.mark.parametrize(("right", "same", "others"), SAME_TEXTS)
def test_the_same_text_is_right_and_its_numbers_alone_are_not(reward, right, same, others):
    """Blanks and ``\\text`` make no difference. math-verify read 9 in 9:30 a.m."""
    for form in (r"\boxed{%s}", r"So it is $\boxed{%s}$.", "<answer>%s</answer>"):
        for text in (right, *same):
            assert reward({"answer": right}, form % text) == 1, text
        for text in others:
            assert reward({"answer": right}, form % text) == 0, text
    for form in ("The answer is %s.", "**%s**", "Answer: %s", "So.\n**Answer:** %s"):
        assert reward({"answer": right}, form % right) == 1


STATED = [
    "The answer is {}.",
    "Answer: {}",
    "**{}**",
    "答案是{}。",
    "答案：{}",
    "So the result is {}.",
]
STATED += ["The answer is **{}**.", "The answer is {}, because it fits.", "So.\n**Answer:** {}"]
STATED += [
    "The answer is {}. I hope it is correct.",
    "The final answer is: {}",
    "<answer>{}</answer>",
]
WHOLE = [
    # Each with others of the same form that are wrong.
    ("1:2", ("2:1", "1:3", "1", "2")),
    ("(3, 4)", ("(4, 3)", "(3, 5)", "3", "4")),
    ("2, 3", ("2, 4", "2", "3", "2.3")),
    ("[2,5)", ("[2,5]", "(2,5)", "[2,6)", "2", "5")),
    ("(-1, 0.5)", ("(1, 0.5)", "-1", "0.5")),
    ("3/4", ("4/3", "3", "4")),
    ("1,024", ("1,025", "1", "24")),
    (r"\frac{1}{2}", (r"\frac{2}{1}", r"\frac{1}{3}", "2")),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", (r"\begin{pmatrix} 3 \\ 2 \end{pmatrix}", "2")),
    ("3√2", ("2√3", r"2\sqrt{3}", "3", "2")),
]


@pytest.mark.parametrize("form", STATED)
def test_what_a_text_states_counts_whole(reward, form):
    """math-verify takes the last number of (3, 4), so it paid `4` for that text, and not (3, 4)."""
    for right, others in WHOLE:
        assert reward({"answer": right}, form.format(right)) == 1, right
        for other in others:
            assert reward({"answer": right}, form.format(other)) == 0, (right, other)
            assert reward({"answer": other}, form.format(right)) == 0, (right, other)


@pytest.mark.parametrize(
    ("right", "text", "expected"),
    [
        *(("42", text, 1) for text in ("It is 42, not 41.", "The answer is 42 (not 41).")),
        *(("42", text, 1) for text in ("It is not 41. It is 42.", "It isn't 41 but 42.")),
        *(("42", text, 0) for text in ("The answer is not 42.", "It isn't 42.", "It is not $42$.")),
        *(("42", text, 0) for text in ("答案不是42。", "It is not 42. It is 41.", "not (42)")),
        *(("12", text, 1) for text in ("It is 12 apples.", "The answer is 12 [1].", "Total: 12")),
        ("12", "The answer is 12: 3 * 4", 1),
        *(("12", text, 0) for text in ("The answer is 12, 13", "It is 12 or 13.", "It is 12:5.")),
        ("0", "If x is not 0, then it is 5. So it is 0", 1),
        ("5", "x is not 0. So x = 5", 1),
        *(("7", text, 1) for text in ("Time: 12:30. So 7", "The sum is 3. So 7", "a: 3, b: 7")),
        *(("3", text, 0) for text in ("The sum is 3. So 7", "Step 1: 3, so 7", "It is 3, then 7")),
    ],
)
def test_what_is_denied_is_not_stated(reward, right, text, expected):
    assert reward({"answer": right}, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is 12.",
        "So 3 + 4 = 7, and 5.",
        "Answer: -12, of 3",
        r"$x_1 = \frac{1}{2}$",
        r"\boxed{f(12)}",
        r"$[2,5)$",
        "He has 48/2 = <<48/2=24>>24.\n#### 72",
        "The final answer is 1,024. I hope it is correct.",
        "3 < 4 and 5 > 2",
        "Ratio 3:4, at 12:30",
        r"\int_0^{12} x'(t) dt = 3 * (4 + 1)",
    ],
)
def test_what_math_verify_reads_is_read_alike(text):
    """math-verify is the judge of texts that it can read."""
    parse = pytest.importorskip("math_verify").parse
    assert parse(readable(final_answer(text))) == parse(text)


def test_long_texts_are_read_in_time(reward):
    """A policy may repeat itself without end."""
    for part in (
        "<answer>",
        "A, ",
        "`12` ",
        r"\boxed{",
        "答案是A ",
        "<b>",
        "*1",
        "答案是1",
        "is ",
        "not 1 ",
    ):
        readable(final_answer(part * 20_000))
        letter_of(part * 20_000)
