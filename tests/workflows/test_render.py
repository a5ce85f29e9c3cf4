import pickle

import numpy as np
import pytest

from marl_jax.workflows import BUILT_IN, Completion, Prompts, load_prompts

FILE = """## system
You judge.
## user
{{question}}

{{drafts}}
## drafts
Draft {{number}}: {{text}}
## again
More: {{critique}}
"""


def prompts():
    return Prompts({"judge": FILE, "bare": "## user\n{{question}}\n"})


def test_a_first_turn_is_system_and_user_and_lists_are_numbered():
    assert prompts().judge(question="2+2?", drafts=["four", "five"]) == [
        {"role": "system", "content": "You judge."},
        {"role": "user", "content": "2+2?\n\nDraft 1: four\nDraft 2: five"},
    ]


def test_items_of_a_list_need_no_number_and_notes_above_the_sections_are_shown_to_nobody():
    told = Prompts({"judge": "A note.\n## user\n{{drafts}}\n## drafts\n- {{text}}\n"}).judge(
        drafts=["4", "5"]
    )
    assert told == [{"role": "user", "content": "- 4\n- 5"}]
    with pytest.raises(ValueError, match="item of 'drafts' has no place for the field 'text'"):
        Prompts({"judge": "## user\n{{drafts}}\n## drafts\n{{number}}.\n"}).judge(drafts=["4", "5"])


def test_a_role_without_a_system_text_has_none():
    assert prompts().bare(question="2+2?") == [{"role": "user", "content": "2+2?"}]
    assert prompts().bare.system() == []


def test_a_later_turn_is_one_user_message():
    assert prompts().judge.again(critique="no") == [{"role": "user", "content": "More: no"}]


def test_a_missing_field_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'judge\.user' needs the field 'drafts'"):
        prompts().judge(question="2+2?")


def test_a_field_of_a_system_message_is_refused_and_never_shown_to_a_model():
    with pytest.raises(ValueError, match=r"'judge\.system' has \{\{topic\}\}, and .* has no fields"):
        Prompts({"judge": "## system\nYou know {{topic}}.\n## user\nGo."}).judge()


def test_a_field_without_a_place_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'judge\.again' has no place for the field 'critic'"):
        prompts().judge.again(critique="no", critic="no")
    spaced = Prompts({"judge": "## user\n{{ question }}"})  # as other templates have it
    with pytest.raises(ValueError, match=r"the field 'question', written \{\{question\}\}; it has: none"):
        spaced.judge(question="?")


@pytest.mark.parametrize("drafts", [None, ["four", None]])
def test_nothing_is_no_text(drafts):
    with pytest.raises(ValueError, match=r"'judge\.user': field 'drafts' is None"):
        prompts().judge(question="2+2?", drafts=drafts)


def test_a_list_without_a_section_of_its_name_is_refused():
    with pytest.raises(ValueError, match="'question' is a list"):
        prompts().bare(question=["a", "b"])


def test_inserted_text_is_never_read_as_a_template():
    assert (
        prompts().bare(question="{{question}} {{x}} \\boxed{{1}}")[0]["content"]
        == "{{question}} {{x}} \\boxed{{1}}"
    )


def test_unknown_roles_and_sections_are_named():
    with pytest.raises(AttributeError, match="no prompt file for role 'juge'; there is: judge, bare"):
        prompts().juge  # noqa: B018
    with pytest.raises(AttributeError, match="'judge' has no section 'agian'"):
        prompts().judge.agian()


@pytest.mark.parametrize("text", ["## system\nx\n", "## user\na\n## user\nb\n", "no section"])
def test_a_file_needs_one_user_section(text):
    with pytest.raises(ValueError, match="section '## user'"):
        Prompts({"judge": text}).judge(question="?")


def test_the_digest_changes_with_any_word():
    files = dict(prompts().files)
    assert Prompts(files).digest() == Prompts(dict(reversed(files.items()))).digest()
    assert Prompts({**files, "bare": "## user\n{{question}}!\n"}).digest() != Prompts(files).digest()


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    (tmp_path / "math").mkdir()
    text = "\ufeff## system\r\nAdd.\r\n\r\n## user\r\n{{question}}\r\n"
    (tmp_path / "math" / "judge.md").write_bytes(text.encode())
    assert [m["role"] for m in load_prompts("math", folder=tmp_path).judge(question="1")] == [
        "system",
        "user",
    ]


def test_a_folder_may_lie_below_the_home_directory_and_a_file_that_is_no_utf_8_is_named(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine" / "math").mkdir(parents=True)
    (tmp_path / "mine" / "math" / "judge.md").write_bytes("## user\nJudge é\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"prompt file '.*mine/math/judge\.md' is not UTF-8"):
        load_prompts("math", folder="~/mine")


@pytest.mark.parametrize("name", ["files", "digest"])
def test_a_role_that_no_prompts_could_be_asked_for_is_refused_by_its_file(tmp_path, name):
    (tmp_path / "math").mkdir()
    (tmp_path / "math" / f"{name}.md").write_text("## user\n{question}\n")
    with pytest.raises(ValueError, match=f"prompt file '{name}.md' .* has a name that no role can have"):
        load_prompts("math", folder=tmp_path)


def test_an_unknown_folder_lists_what_there_is():
    with pytest.raises(ValueError, match="there is: code, code_micro, math, math_micro"):
        load_prompts("physics")


@pytest.mark.parametrize("size", ["full", "micro"])
@pytest.mark.parametrize("family", ["math", "code"])
def test_every_role_of_every_workflow_has_words_in_every_family(family, size):
    files = load_prompts(family, size).files
    for workflow in BUILT_IN.values():
        if family in workflow.families:
            assert set(workflow.roles) <= set(files), workflow.name


@pytest.mark.parametrize("family", ["math", "code"])
def test_micro_prompts_are_a_few_characters_long(family):
    for role, text in load_prompts(family, "micro").files.items():
        assert len(text.replace("## ", "")) < 120, role


def test_prompts_travel_between_processes():
    assert pickle.loads(pickle.dumps(prompts())) == prompts()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            [{"text": "four"}],
            r"field 'drafts' holds a dict, \{'text': 'four'\}: give a text, a number or a comp",
        ),
        ({"text": "four"}, "field 'drafts' holds a dict"),
        ([["four"]], "field 'drafts' holds a list"),
        ((text for text in ("four", "five")), "field 'drafts' holds a generator"),
        ("four", "field 'drafts' is a text, and '## drafts' renders the items of a list"),
    ],
)
def test_what_a_template_does_not_take_is_refused_and_never_rendered_as_python(value, told):
    with pytest.raises(ValueError, match=r"prompt 'judge\.user': " + told):
        prompts().judge(question="2+2?", drafts=value)


def test_numbers_and_completions_are_taken_as_they_read():
    said = Completion("four", (1,), (0.0,), "stop", None, 0)
    made = prompts().judge(question=4, drafts=(said, np.int32(5), 2.5))
    assert made[1]["content"] == "4\n\nDraft 1: four\nDraft 2: 5\nDraft 3: 2.5"
