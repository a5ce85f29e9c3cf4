r"""What counts as the same answer, and what does not: tables of (boxed answer, gold answer, why)."""

import pytest

from marl_jax.rewards import equivalent, grade_math
from marl_jax.rewards import math as grader

SAME = {
    "numbers are compared by value": [
        ("1,000", "1000"),
        ("1{,}000", "1000"),
        (r"1,\!000", "1000"),
        (r"1\,000\,000", "1000000"),
        ("1 000 000", "1000000"),
        ("1e3", "1000"),
        ("1.5e-3", "0.0015"),
        (".5", "0.5"),
        ("1/2", ".5"),
        (r"\frac12", "0.5"),
        (r"\dfrac{1}{2}", r"\tfrac12"),
        (r"\frac{2}{4}", r"\frac{1}{2}"),
        (r"\frac{-1}{2}", r"-\frac12"),
        (r"\frac{1}{-2}", r"-\frac12"),
        ("-0", "0"),
        ("+7", "7"),
        ("007", "7"),
        ("3.0", "3"),
        ("5.", "5"),
        (r"0.\overline{3}", r"\frac13"),
        (r"1\frac{1}{2}", "1.5"),
        (r"-2\frac13", r"-\frac{7}{3}"),
        ("1 1/2", r"\frac32"),
        (r"3\times10^8", "300000000"),
        (r"5.0 \times 10^{-3}", "0.005"),
        (r"3 \cdot 10^{8}", r"3\times 10^8"),
        ("2^{10}", "1024"),
        ("5!", "120"),
        (r"\binom{5}{2}", "10"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"|-3|", "3"),
        ("−5", "-5"),
        ("5²", "25"),
        ("10⁵", "100000"),
        ("2⁴", "16"),
        ("10⁻³", "0.001"),
        ("½", "0.5"),
        ("⅓", "1/3"),
        ("⅔", r"\frac23"),
        ("2⅓", "7/3"),
        ("2 ⅓", "7/3"),
        ("1⁄2", "0.5"),
        ("¹⁄₂", "0.5"),
        ("5 million", "5000000"),
        ("5 squared", "25"),
        ("5 factorial", "120"),
        ("3 halves", "3/2"),
        ("2 thirds", r"\frac23"),
        ("5 tenths", "0.5"),
    ],
    "spacing, styling and delimiters mean nothing": [
        (r"$\frac{1}{2}$", "0.5"),
        (r"\(\frac{1}{2}\)", "0.5"),
        ("{5}", "5"),
        ("(5)", "5"),
        ("=5", "5"),
        (r"\displaystyle \frac{1}{2}", r"\frac12"),
        (r"\left( 3 ,\, 4 \right)", "(3,4)"),
        (r"\big[1,~2\big)", "[1,2)"),
        (r"\mathbf{7}", "7"),
        (r"5", r"The answer is $\boxed{5}$."),
    ],
    "radicals and constants": [
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
        (r"\sqrt2/2", r"\frac{\sqrt{2}}{2}"),
        (r"\sqrt{2}\sqrt{3}", r"\sqrt6"),
        (r"\frac{\sqrt5+1}{2}", r"\frac12 + \frac{\sqrt{5}}{2}"),
        ("sqrt(2)", r"\sqrt{2}"),
        ("√12", "2√3"),
        ("√(12)", r"2\sqrt3"),
        ("sqrt12", r"2\sqrt3"),
        ("∛27", "3"),
        ("∛(27)", "3"),
        (r"1063\sqrt{7}", r"\sqrt{7909783}"),
        (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
        (r"\pi \cdot 2", r"2\pi"),
        (r"\pi/2", r"\frac{\pi}{2}"),
        ("2pi", r"2\pi"),
        (r"\sin 30^\circ", r"\frac12"),
        (r"\tan^{-1}(1)", r"\frac{\pi}{4}"),
        (r"\log_2 8", "3"),
        (r"\log 100", "2"),
        (r"\ln 8", r"3\ln 2"),
        (r"\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}", "1"),
        (r"\cos\frac{\pi}{7}-\cos\frac{2\pi}{7}+\cos\frac{3\pi}{7}", r"\frac12"),
        ("4i+3", "3+4i"),
        (r"e^{i\pi}", "-1"),
        (r"\sqrt{-4}", "2i"),
        (r"+\infty", r"\infty"),
    ],
    "expressions": [
        ("(x+1)^2", "x^2+2x+1"),
        (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
        (r"x \cdot 2", "2x"),
        ("yx", "xy"),
        ("a/b", r"\frac{a}{b}"),
        (r"2^{x+1}", r"2\cdot 2^x"),
        (r"\frac{n!}{(n-1)!}", "n"),
        (r"\frac{n!}{k!(n-k)!}", r"\binom{n}{k}"),
        (r"\tan x", r"\frac{\sin x}{\cos x}"),
        (r"\frac{1}{\sqrt{x}+1}", r"\frac{\sqrt{x}-1}{x-1}"),
        (r"\sqrt{x^2}", "|x|"),
        (r"\max(a,b)", r"\max(b,a)"),
        (r"\cos 2x", r"1-2\sin^2 x"),
        (r"2\sin x\cos x", r"\sin 2x"),
        (r"\sin^2 x+\cos^2 x", "1"),
        (r"\sec^2\theta - \tan^2\theta + x", "x+1"),
        (r"\tan x \cot x", "1"),
        (r"\log_x x", "1"),
        (r"\frac{\ln x + y}{\ln x + y}", "1"),
        ("x_{1}+x_2", "x_2+x_1"),
        ("x²y³", "x^2 y^3"),
        ("x₁₂", "x_{12}"),
        ("eˣ", "e^x"),
    ],
    "sets and bare lists have no order; duplicates in a set do not count": [
        (r"\{3,2,1\}", r"\{1,2,3\}"),
        (r"\left\{1,1,2\right\}", r"\{1,2\}"),
        ("2, 1", r"\{1,2\}"),
        (r"1 \text{ and } 2", "2,1"),
        ("1, 2, and 3", "3,2,1"),
        (r"\pm 2", "2, -2"),
        (r"5 \pm 2", "3, 7"),
        (r"(0,1),(1,0)", "(1,0), (0,1)"),
        (r"\frac{-3\pm\sqrt5}{2}", r"\frac{-3+\sqrt{5}}{2}, \frac{-3-\sqrt{5}}{2}"),
        (r"x=1 \text{ or } x=2", "1, 2"),
        ("x_1=1, x_2=2", "1,2"),
        (r"\{5\}", "5"),
        (r"\{\}", r"\emptyset"),
        ("Bob, Alice", r"\text{Alice, Bob}"),
    ],
    "tuples, intervals and matrices, part by part": [
        (r"(\frac12, 0.5)", r"(0.5,\frac{1}{2})"),
        (r"\langle 1,2\rangle", "(1,2)"),
        (r"\left(-\infty,1\right)\cup(2,\infty)", r"(2,\infty) \cup (-\infty,1)"),
        (r"x\in(-\infty,1)\cup(2,\infty)", r"(-\infty,1)\cup(2,\infty)"),
        (r"1 \le x < 2", "[1,2)"),
        ("x > 3", r"(3,\infty)"),
        ("3 < x", "x>3"),
        (r"x<1 \text{ or } x>3", r"(-\infty,1)\cup(3,\infty)"),
        (r"\mathbb{R}", r"(-\infty,\infty)"),
        (r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\left[\begin{array}{cc}1&2\\3&4\end{array}\right]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}", r"\begin{pmatrix} \frac12 \\ 3 \end{pmatrix}"),
        ("3 : 4", "3:4"),
    ],
    "a unit may be left out or written otherwise": [
        (r"5\text{ cm}", "5"),
        ("5 cm", r"5\,\mathrm{cm}"),
        ("5", r"5 \text{ meters}"),
        ("5 m", r"5\text{ meters}"),
        (r"5\,\mathrm{cm}^2", r"5 \text{ square centimeters}"),
        (r"5^\circ", "5"),
        (r"5^{\circ}", "5 degrees"),
        (r"\$5.00", "5"),
        (r"\$1,000", "1000"),
        (r"\$5", r"5\text{ dollars}"),
        ("10 km/h", "10"),
        ("3/4 cups", r"\frac34 \text{ cup}"),
        ("12 apples", "12"),
        (r"8\pi \text{ cm}^2", r"8\pi"),
        ("5 sq ft", r"5 \text{ square feet}"),
        ("5 cubic meters per second", "5"),
        ("20 dollars per ticket", "20"),
        ("3 cups of flour", "3"),
        ("1 way", "1"),
        ("5 people", "5"),
        ("5 million people", "5000000"),
        ("5 zorbles", "5"),
        ("5 cm per zorble", "5"),
        ("5 zorble", "5 Zorble"),
    ],
    r"50\% is 0.5, and 50 as data sets write it": [
        (r"50\%", "0.5"),
        (r"50\%", r"\frac12"),
        (r"50\%", "50"),
        ("50", r"50\%"),
        ("0.5", r"50\%"),
        ("50 percent", r"50\%"),
    ],
    "choices and words": [
        ("A", "(A)"),
        (r"\text{A}", "A"),
        (r"\textbf{(A)}", r"\text{A}"),
        ("A.", "A"),
        (r"\text{Monday}", "Monday"),
        ("monday.", r"\text{Monday}"),
        (r"\text{No}", "no"),
        ("no real solutions", r"\text{No real solutions}"),
    ],
    "a choice may come with its text": [
        *(
            (answer, "B")
            for answer in ("(B) 12", "B. 12", "B) 12", "B: 12", "(b)", "(b) 12", r"\text{(B)}", "B.")
        ),
        *(
            (answer, "B")
            for answer in (r"\textbf{(B)}\ \frac12", r"\textbf{(B) }-5", r"(\text{B})", "$(B)$ 12")
        ),
        *(
            (answer, "B")
            for answer in ("Option B", "choice (b): 12", "Answer: B", r"\text{B) Monday and Tuesday}")
        ),
        ("D. not enough information", "(D)"),
        ("B", r"\textbf{(B)}\ 12"),
        ("B. 12", r"\textbf{(B)}\ 12"),
        ("B) 0.5", r"\textbf{(B)}\ \frac12"),
    ],
    "a label may be left out": [
        ("x=5", "5"),
        ("5", "x = 5"),
        ("x=2+3=5", "5"),
        (r"x \approx 2.5", "2.5"),
        ("f(x)=x^2", "x^2"),
        ("y=2x+1", "2x+1"),
        ("P(A) = 1/2", "0.5"),
        ("|AB| = 5", "5"),
        (r"\angle ABC = 60^\circ", "60"),
        (r"\vec{v} = (1,2)", "(1,2)"),
        (r"m\angle A = 60^\circ", "60"),
        (r"x = \pm 2", "-2, 2"),
        (r"\text{Area} = 12", "12"),
        ("(x,y)=(1,2)", "(1,2)"),
    ],
    "equations with the same solutions": [
        ("2x - y + 1 = 0", "y=2x+1"),
        ("2x^2+2y^2=8", "x^2+y^2=4"),
        ("y=2, x=1", "x=1,y=2"),
        ("2y > 4x", "y > 2x"),
    ],
    "numerals in another base": [("101₂", "101_{2}"), ("101_2", "101_{2}"), (r"(2A)_{16}", "2A_{16}")],
}

DIFFERENT = {
    "a rounded value is another value": [
        ("0.333", "1/3"),
        ("0.3333333333", "1/3"),
        ("1.41421356", r"\sqrt{2}"),
        ("1.414213562373095", r"\sqrt{2}"),
        ("3.14", r"\pi"),
        ("3.141592653589793", r"\pi"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"),
        ("5.001", "5"),
    ],
    "several answers are not one": [
        ("1 or 2", "1"),
        (r"1 \text{ or } 2", "2"),
        ("1, 2", "1"),
        ("1,1", "1"),
        ("5 5", "5"),
        (r"\pm 2", "2"),
        ("x=5, x=6", "5"),
        ("A, B", "A"),
        ("Monday or Tuesday", "Monday"),
        (r"\{1,2,3\}", r"\{1,2\}"),
        (r"\{1,2\}", r"\{1,2,3\}"),
        ("(1,2,3)", "(1,2)"),
    ],
    "the gold answer inside of other text is not the answer": [
        ("15", "5"),
        ("1 2", "12"),
        ("The answer is not 5", "5"),
        ("5 but not 6", "5"),
        ("not Monday", "Monday"),
        (r"\text{none}", "0"),
        ("none", "5"),
        ("5?", "5"),
        ("AB", "A"),
    ],
    "another choice, two choices, or a value for a choice": [
        *(
            (answer, "B")
            for answer in ("(C) 12", "C. 12", "C) B", "(c)", r"\text{(C)}", "Option C", "12", "b", "BB")
        ),
        *(
            (answer, "B")
            for answer in ("(A) or (B)", "(B) or C", "(B) 1 or (C) 3", "B. 1, C. 3", "(B)(C)", "B: C")
        ),
        *((answer, "B") for answer in ("(B)^2", "(B) + 1", "(B) - 1", r"(B) \cdot 2", "(B) is wrong", "B.5")),
        ("answer Bob", "B"),
        ("(B) 13", r"\textbf{(B)}\ 12"),
        ("12", r"\textbf{(B)}\ 12"),
        ("(B) 12", "12"),
    ],
    "the question is not its answer": [
        ("2x+3=13", "5"),
        ("2x+3=13", "x=5"),
        ("2+3", "5"),
        (r"2 \times 3", "6"),
        ("2(3)", "6"),
        ("2+3=?", "5"),
        ("What is 2+3?", "5"),
        ("10=5", "5"),
        ("4=5=5", "5"),
    ],
    "signs, orders and digits count": [
        ("-5", "5"),
        ("1/2", "2"),
        (r"1\frac{1}{2}", r"\frac{11}{2}"),
        ("1 1/2", "11/2"),
        ("10^5", "105"),
        ("10⁵", "105"),
        ("x⁴", "4x"),
        ("x₁", "x"),
        ("¹", "1"),
        ("eˣ", "ex"),
        ("2⅓", "2/3"),
        ("5,6", "5.6"),
        ("4,2", "42"),
        ("3-4i", "3+4i"),
        (r"-\infty", r"\infty"),
        (r"\frac{0}{0}", "0"),
        (r"\frac{5}{0}", "5"),
        (r"\frac{\infty}{\infty}", "1"),
        (r"\infty - \infty", "0"),
        (r"0 \cdot \infty", "0"),
        (r"5 \pm 0.1", "5"),
        (r"5 \text{ to } 6", "5"),
        ("x>5", "5"),
        (r"x \ne 5", "x=5"),
    ],
    "what agrees at some values only": [
        ("t", "|t|"),
        ("a", r"\max(a,b)"),
        ("b", r"\max(a,b)"),
        (r"\sqrt{x^2}", "x"),
        (r"\sqrt{q^2}", "q"),
        (r"\lfloor x \rfloor", "1"),
        (r"\lfloor x^2/10^5 \rfloor", "0"),
        (r"\max(x,-10)", "x"),
        (r"|x+100|-x", "100"),
        (r"\frac{|x|}{x}", "1"),
        (r"\sin^2 x+\cos^2 y", "1"),
    ],
    "names count": [
        ("2y", "2x"),
        ("x=5", "y=5"),
        ("X", "x"),
        ("x", "y"),
        ("2", "2x"),
        ("B", "A"),
        ("y>3", "x>3"),
    ],
    "brackets count": [
        ("[1,2]", "(1,2)"),
        ("(1,2]", "(1,2)"),
        ("(2,1)", "(1,2)"),
        (r"\{1,2\}", "(1,2)"),
        ("1,2", "(1,2)"),
        (r"x \ge 3", "x>3"),
        ("x<3", "x>3"),
        (r"(-\infty,1)\cup(1,\infty)", r"(-\infty,\infty)"),
        (r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
        ("-2y > -4x", "y > 2x"),
    ],
    "a unit may not be changed": [
        ("5 cm", "5 m"),
        (r"5\text{ cm}", r"5\text{ cm}^2"),
        ("12 apples", "12 oranges"),
        ("5 hours", r"5\text{ minutes}"),
        (r"60^\circ", r"60\%"),
        ("5 million", "5"),
        (r"0.5\%", r"50\%"),
        ("0.5", "50"),
        (r"5\%", "0.5"),
        (r"\$5", r"5\text{ euros}"),
        ("100 cm", "1 m"),
        ("5 zorble", "5"),
        ("5", "5 zorble"),
    ],
    "numerals in another base": [("101_3", "101_2"), ("101", "101_2"), ("5", "101_2")],
    "words that change a number are no unit of it": [
        *(
            (f"5 {words}", "5")
            for words in ("squared", "factorial", "tenths", "minus one", "plus six", "minus")
        ),
        *(
            (f"5 {words}", "5")
            for words in ("times ten", "at most", "wrong", "almost surely", "negative", "less")
        ),
        *(
            (f"5 {words}", "5")
            for words in ("hundred thousandths", "per", "of them", "cm wrong", "apples minus one")
        ),
        *(
            (f"5 {words}", "5")
            for words in ("in base six", "quarters", "divided by two hours", "apples too many")
        ),
        ("10 divided by two", "10"),
        ("6 remainder two", "6"),
        ("12 base eight", "12"),
        ("2 negative", "2"),
        ("3 halves", "3"),
        ("2 thirds", "2"),
    ],
    "nothing says nothing": [(" ", "5"), ("5", ""), (r"\text{}", "0"), ("$$", "5"), ("", "")],
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """What is the same does not depend on how busy the machine is."""
    monkeypatch.setattr(grader, "WALL_LIMIT_S", 60.0)


def rows(table: dict) -> list:
    return [
        pytest.param(*row, id=f"{why}: {row[0]} | {row[1]}") for why, pairs in table.items() for row in pairs
    ]


@pytest.mark.parametrize(("answer", "gold"), rows(SAME))
def test_the_same_answer_earns_one(answer, gold):
    assert grade_math(rf"so it is $\boxed{{{answer}}}$.", gold) == 1.0


@pytest.mark.parametrize(("answer", "gold"), rows(DIFFERENT))
def test_another_answer_earns_nothing(answer, gold):
    assert grade_math(rf"so it is $\boxed{{{answer}}}$.", gold) == 0.0


@pytest.mark.parametrize("answer", [answer for pairs in SAME.values() for answer, _ in pairs])
def test_every_answer_is_the_same_as_itself(answer):
    assert equivalent(answer, answer)


@pytest.mark.parametrize(
    ("response", "reward", "why"),
    [
        (r"\boxed{5}", 1.0, "a box with the answer"),
        (r"the answer is 5", 0.0, "without a box there is no answer"),
        (r"\boxed{5}, no: \boxed{6}", 0.0, "the last box counts"),
        (r"\boxed{6}, no: \boxed{5}", 1.0, "the last box counts"),
        (r"\boxed{5} \boxed{}", 0.0, "an empty box is the last one"),
        (r"\boxed{5", 0.0, "a box that was cut is no answer"),
        (r"\boxed{5} Let me check: \boxed{", 1.0, "what was cut does not undo what was said"),
        (r"\boxed{\boxed{5}}", 1.0, "a box in a box"),
        ("", 0.0, "nothing said"),
    ],
)
def test_the_box_decides(response, reward, why):
    assert grade_math(response, "5") == reward, why


def test_grading_is_a_float_of_zero_or_one():
    assert [type(grade_math(r"\boxed{1}", gold)) for gold in "12"] == [float, float]


@pytest.mark.parametrize(("response", "gold", "named"), [(None, "5", "response"), (r"\boxed{5}", 5, "gold")])
def test_what_is_no_text_is_named(response, gold, named):
    with pytest.raises(TypeError, match=f"^{named} is "):
        grade_math(response, gold)
