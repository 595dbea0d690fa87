"""Verifiers of short answers (M39, M64) and of tool calls (M63), and what they do when they fail."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from mcore_agent.protocols import InfraError
from mcore_agent.reward.answers import Answer, words
from mcore_agent.reward.children import Children, VerifierError
from mcore_agent.reward.mathematics import Mathematics
from mcore_agent.reward.pipeline import RewardError, Scorer, score
from mcore_agent.reward.research import Research
from mcore_agent.reward.texts import boxed, final_text, program
from mcore_agent.reward.toolrl import ToolRL
from mcore_agent.reward.web_state import WebState
from mcore_agent.reward.web_store import WebStore
from tests.reward.episodes import call, played

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def math():
    """One reward, so that its child process is started once."""
    return Mathematics(limit_s=20.0, processes=1)


@pytest.fixture
def faulty(monkeypatch, tmp_path):
    """Adds a module to what children may call: ``faulty(source)``; its functions are ``hostile:name``."""
    import mcore_agent.reward.isolated as package

    (tmp_path / "hook").mkdir()
    site = tmp_path / "hook" / "sitecustomize.py"
    site.write_text(f"import mcore_agent.reward.isolated as p; p.__path__.append({str(tmp_path)!r})")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'hook'}{os.pathsep}{ROOT}")
    assert package.__path__
    return lambda source: (tmp_path / "hostile.py").write_text(source)


# ------------------------------------------------------------------------------------------------------ math

GOLDEN = [
    ("42", "42", 1), ("42", "4 2.5", 0), ("-3", "3", 0), ("1{,}000", "1000", 1), ("1000", "1,000", 1),  # numbers
    (r"\frac{1}{2}", "0.5", 1), (r"\frac12", r"\frac{2}{4}", 1), ("0.33", r"\frac{1}{3}", 0), (r"3\frac{1}{2}", "3.5", 1),  # fractions
    (r"\{1,2,3\}", r"\{3,1,2\}", 1), (r"\{1,2,3\}", r"\{1,2\}", 0),  # sets have no order
    ("[0,1)", "[0,1)", 1), ("[0,1)", "[0,1]", 0), (r"(-\infty,2]", r"(-\infty, 2]", 1), (r"[0,1]\cup[2,3]", r"[2,3]\cup[0,1]", 1),
    ("(1,2)", "(2,1)", 0),  # a point has
    (r"10\text{ cm}", "10", 1), (r"10\text{ cm}", r"11\text{ cm}", 0), (r"90^\circ", "90", 1), (r"50\%", "0.5", 1),  # units
    (r"2\sqrt{3}", r"\sqrt{12}", 1), ("x^2+2x+1", "(x+1)^2", 1), ("x^2+1", "x^2+2", 0), ("x=5", "5", 1),  # expressions
    (r"\text{Monday}", r"\text{Tuesday}", 0), ("A", "A", 1),  # words
    ("5 km", "5 km", 1), ("5 km", "5", 1), ("5", "5 km", 1), ("5 km", "5 kg", 0), ("5 km", "-5 km", 0),  # units that both have count
    (r"5\text{ km}", r"5\ \mathrm{km}", 1), (r"5\,\mathrm{km}", r"5\text{ kg}", 0), ("5km", "5kg", 0), ("5 km", "5 Kilometers.", 1),
    ("5 km", "5000 m", 1), ("5 km", "5 m", 0), ("5 km", "5000 km", 0), (r"\frac{1}{2}\text{ km}", "500 m", 1), ("5 km", "x = 5000 m", 1),
    (r"3\times 10^5\text{ m}", "300 km", 1), (r"18\text{ km/h}", r"5\text{ m/s}", 1), ("18 km per hour", "18 km", 0),  # 18000 / 3600
    (r"5\text{ m}^2", "5 square meters", 1), (r"5\text{ m}^{2}", r"5\text{ m}", 0), (r"2\text{ cm}^3", "2 ml", 1),
    ("2 hours", "120 min", 1), ("2 hours", "120", 0), ("1 mile", "1609.344 m", 1), ("1 lb", "0.45359237 kg", 1),
    (r"9.8\ \mathrm{m}\cdot\mathrm{s}^{-2}", r"9.8\text{ m/s}^2", 1), (r"9.8\text{ m/s}^2", r"9.8\text{ m/s}", 0),
    (r"5\text{ apples}", r"5\text{ kg}", 1), (r"5\text{ km}", r"5\text{ units}", 1),  # what is no unit does not
    ("3x", "3x", 1), ("3x", "4x", 0), (r"30^\circ", r"30\text{ degrees}", 1),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer", "right"), GOLDEN, ids=[f"{g} {a}" for g, a, _ in GOLDEN])
def test_golden_cases(math, gold, answer, right):
    episode = played("look", rf"<think>Maybe \boxed{{7}}.</think>It is $\boxed{{{answer}}}$.", gold=gold)
    assert math.score(episode) == {"math": right}
    assert math.score(episode) == {"math": right}  # and again


def test_only_the_last_closed_box_after_thoughts_counts(math):
    for text, right in [
        (r"\boxed{5}", 1), (r"first \boxed{4} then \boxed{5}", 1), (r"first \boxed{5} then \boxed{4}", 0),
        ("5", 0), ("", 0), (r"\boxed{}", 0),
        (r"\boxed{5", 0), (r"<think>\boxed{5}</think> so it is 5", 0), (rf"\boxed{{5{'+0' * 300}}}", 0),  # 601 characters
    ]:  # fmt: skip
        assert math.score(played(text, gold=5)) == {"math": right}, text
    assert math.score(played("x", r"\boxed{6}", gold=["5", 6])) == {"math": 1}, "one of several"
    assert math.score(played(r"\boxed{6}", "no box", gold=6)) == {"math": 0}, "the last turn"


@pytest.mark.defect("C13")
def test_an_answer_is_never_evaluated(math, tmp_path):
    """Neither as Python nor by the reader of expressions."""
    mark = tmp_path / "mark"
    python = f"__import__('os').system('touch {mark}')"
    for code in (python, f"${python}$", f"exec('open(`{mark}`, `w`)')".replace("`", '"')):
        assert math.score(played(rf"\boxed{{{code}}}", gold=5)) == {"math": 0}
    assert not mark.exists()


@pytest.mark.defect("H6")
def test_a_comparison_without_end_is_a_failure_and_the_next_one_works():
    quick = Mathematics(limit_s=1.0)
    assert quick.score(played(r"\boxed{5}", gold=5)) == {"math": 1}
    began = time.monotonic()
    with pytest.raises(VerifierError, match=r"verifier_timeout: no answer within 1 s") as caught:
        quick.score(played(r"\boxed{(10^{10^{8}})! + 1}", gold="7"))
    assert time.monotonic() - began < 30 and caught.value.kind == "timeout" and isinstance(caught.value, InfraError)
    assert quick.score(played(r"\boxed{5}", gold=5)) == {"math": 1}
    scored = score([played(r"\boxed{(10^{10^{8}})! + 1}", gold="7")], [{"name": "math", "limit_s": 1.0}])
    assert (scored[0].status, scored[0].reason) == ("infra_fail", "reward 'math': verifier_timeout: no answer within 1 s")
    assert scored[0].rewards == {}


@pytest.mark.parametrize("gold", [None, "", [], {"a": 1}, True, ["5", None]])
def test_a_task_without_gold_is_a_failure(math, gold):
    with pytest.raises(VerifierError, match="verifier_gold: task 'task of e' has the gold"):
        math.score(played(r"\boxed{5}", gold=gold))


@pytest.mark.parametrize(("fields", "says"), [
    ({"limit_s": 0.0}, "limit_s is 0.0"), ({"processes": 0}, "processes is 0"), ({"max_chars": -1}, "max_chars is -1"),
])  # fmt: skip
def test_settings_of_math_out_of_range(fields, says):
    with pytest.raises(RewardError, match=f"reward 'math': {says}, but must be above 0"):
        Mathematics(**fields)


# -------------------------------------------------------------------------------------------------- children


@pytest.mark.defect("H6")
@pytest.mark.parametrize(("source", "kind", "says"), [
    ("while True: pass", "timeout", "no answer within 1 s"),
    ("pow(7, 10**9)", "timeout", "no answer within 1 s"),  # one instruction that never gives way
    ("import time; time.sleep(100)", "timeout", "no answer within 1 s"),
    ("b'1' * (10 << 30)", "memory", "MemoryError"),
    ("1 / 0", "crash", "ZeroDivisionError: division by zero"),
    ("import os; os.kill(os.getpid(), 11)", "crash", "SIGSEGV"),
    ("import sys; sys.exit(3)", "crash", ""),
    ("import os; os.close(0); os._exit(0)", "crash", ""),
])  # fmt: skip
def test_each_way_to_fail_has_its_kind(faulty, source, kind, says):
    faulty(f"def good(x): return [x, x + 1]\ndef bad(x):\n    {source}\n    return 0")
    children = Children(limit_s=1.0, most=1, memory_bytes=1 << 30)
    assert children.call("hostile:good", x=3) == [3, 4]
    with pytest.raises(VerifierError, match=f"verifier_{kind}: .*{says}") as caught:
        children.call("hostile:bad", x=3)
    assert caught.value.kind == kind
    assert children.call("hostile:good", x=5) == [5, 6]


def test_what_a_function_prints_is_no_answer(faulty):
    faulty("def loud(x):\n    print('{\"value\": 9}', flush=True)\n    return x")
    assert Children(1.0).call("hostile:loud", x=2) == 2


def test_threads_share_children_and_each_gets_its_own_answer(faulty):
    faulty("import os, time\ndef slow(x):\n    time.sleep(.02)\n    return [x, os.getpid()]")
    children, found = Children(5.0, most=2), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: children.call("hostile:slow", x=i)})) for i in range(11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i][0] for i in range(11)] == list(range(11))
    assert len({pid for _, pid in found.values()}) <= 2


def test_children_end_with_their_owner_however_it_ends(faulty):
    """Forgotten: at once. Killed: they notice the end of their input, or their time limit ends them."""
    faulty("import os\ndef pid(x): return os.getpid()\ndef stuck(x):\n    while True: pass")
    children = Children(5.0)
    pid = children.call("hostile:pid", x=0)
    assert psutil.pid_exists(pid)
    del children
    assert not psutil.pid_exists(pid)
    text = (
        "import threading, time; from mcore_agent.reward.children import Children\nc = Children(3.0)\n"
        "for _ in range(2): print(c.call('hostile:pid', x=0), flush=True)\n"
        "threading.Thread(target=c.call, args=('hostile:stuck',), kwargs={'x': 0}).start()\ntime.sleep(99)"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    assert pids[0] == pids[1]
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == psutil.STATUS_ZOMBIE


@pytest.mark.defect("H6")
def test_a_pool_ends_in_time_also_while_a_call_hangs(faulty):
    """Its owner is forgotten while one child is idle and another one hangs: within 5 s neither is there. The call fails by its limit."""
    faulty("import os\ndef pid(x): return os.getpid()\ndef stuck(x):\n    while True: pass")
    children, failed = Children(2.0, most=2), []
    idle = children.call("hostile:pid", x=0)

    def hang(children):
        with pytest.raises(VerifierError) as caught:
            children.call("hostile:stuck", x=0)
        failed.append(caught.value.kind)

    thread = threading.Thread(target=hang, args=(children,))
    thread.start()
    other = children.call("hostile:pid", x=0)  # the idle one is busy, so that this is a new one
    assert other != idle
    began = time.monotonic()
    thread.join(30)
    del children
    gc.collect()  # the exception and its frames hold one another
    while any(map(psutil.pid_exists, (idle, other))) and time.monotonic() < began + 30:
        time.sleep(0.02)
    assert failed == ["timeout"] and time.monotonic() - began < 2 + 5


# --------------------------------------------------------------------------------------------------- answers


def test_normalization():
    assert words("The  Red-Fort, a U.S. site!\n") == ["redfort", "us", "site"]
    assert words("an apple another the") == ["apple", "another"]


@pytest.mark.parametrize(("found", "gold", "exact", "f1"), [
    ("red fort.", "The Red Fort", 1, 1),
    ("fort red hill", "The Red Fort", 0, 0.8),  # 2 common of 3 and 2: 2 * 2 / 5
    ("fort fort", "red fort", 0, 0.5),  # a word counts as often as both have it: 2 * 1 / 4
    ("lake", "The Red Fort", 0, 0),
    ("the", "The Red Fort", 0, 0),
    ("1912", ["1911", 1912], 1, 1),
    ("red", ["red fort", "red green blue"], 0, 2 / 3),  # the best one: 2 * 1 / 3
])  # fmt: skip
def test_answers(found, gold, exact, f1):
    episode = played("search", f"<think><answer>nine</answer></think> So <answer>x</answer> or <answer>{found}</answer>.", gold=gold)
    assert Answer().score(episode) == {"answer": exact}
    assert Answer(measure="f1", key="words").score(episode) == {"words": pytest.approx(f1, rel=1e-12)}


def test_where_an_answer_stands():
    for place, text, right in [
        ("answer", "red fort", 0), ("whole", "red fort", 1), ("whole", "<think>hm</think>\nRed fort", 1), ("boxed", r"\boxed{red fort}", 1),
        ("boxed", "<answer>red fort</answer>", 0), ("answer", "<answer>red fort", 0),
    ]:  # fmt: skip
        assert Answer(place=place).score(played(text, gold="red fort")) == {"answer": right}, (place, text)
    with pytest.raises(VerifierError, match="verifier_gold"):
        Answer().score(played("<answer>x</answer>"))


def test_parts_of_a_last_turn():
    assert boxed(r"\boxed{\frac{1}{2}} and \boxed{ {a}{b} }") == "{a}{b}" and boxed(r"\boxed{1") is None
    assert final_text(played("a", "<think>b</think>c")) == "c" and final_text(played("a", "plain")) == "plain"
    assert program("```python\nx\n```\ntext\n```py\ny\nz\n```\n```json\n{}\n```") == "y\nz\n"
    assert program("```\nx\n```") == "x\n" and program("x = 1") is None and program("```python\nx") is None


def test_research_three_cases():
    """M64: the F1 where there is one; .1 for the form alone; 0 for neither."""
    think = "<think>hm</think>"
    for first, last, value in [
        (think, "<answer>fort</answer>", 2 / 3),  # 2 * 1 / (1 + 2)
        ("", "<answer>fort</answer>", 2 / 3),  # F1 needs no form
        (think, "<answer>lake</answer>", 0.1),
        ("", "<answer>lake</answer>", 0.0),  # a turn without thoughts
        (think, "red fort", 0.0),  # no answer
        (think, "<answer></answer>", 0.0),
    ]:
        episode = played(f"{first}search", f"{think}{last}", gold="red fort")
        assert Research().score(episode) == {"research": pytest.approx(value, rel=1e-12)}, last
        # What was retrieved is observed, never learned from: [prompt, action, obs, action].
        assert episode.rows[0].channel("pg").tolist() == [False, True, False, True]
    with pytest.raises(RewardError, match="reward 'research': form is 1.0"):
        Research(form=1.0)


# ---------------------------------------------------------------------------------------------------- ToolRL

GOLD = [{"name": "search", "arguments": {"q": "lake", "k": 3}}]
THINK = "<think>hm</think>"


@pytest.mark.parametrize(("text", "correct", "form"), [
    # most = 1 + 1 + 2 = 4. All right: 1 + 1 + 2 = 4 of 4: 6 - 3.
    (THINK + call("search", q="lake", k=3), 3.0, 1),
    # Another name: nothing matches.
    (THINK + call("find", q="lake", k=3), -3.0, 1),
    # Half of the parameters, right: name 1, parameters 1/2, values 1: 6 * 2.5 / 4 - 3.
    (THINK + call("search", q="lake"), 0.75, 1),
    # Both parameters, one value wrong: 1 + 1 + 1 = 3: 6 * 3 / 4 - 3.
    (THINK + call("search", q="lake", k=4), 1.5, 1),
    # A parameter too much: 1 + 2/3 + 2: 6 * (11/3) / 4 - 3.
    (THINK + call("search", q="lake", k=3, z=0), 2.5, 1),
    # A second call of another name: names 1/2, parameters 1, values 2: 6 * 3.5 / 4 - 3.
    (THINK + call("search", q="lake", k=3) + call("find"), 2.25, 1),
    # A worse partner beside the right one takes nothing away.
    (THINK + call("search", q="sea") + call("search", q="lake", k=3), 3.0, 1),
    (THINK + "no call", -3.0, 1),
    (THINK + "<tool_call>{broken</tool_call>", -3.0, 0),
    (call("search", q="lake", k=3), 3.0, 0),
])  # fmt: skip
def test_toolrl_by_hand(text, correct, form):
    got = ToolRL().score(played(text, gold=GOLD))
    assert got == {"tool_correct": pytest.approx(correct, rel=1e-12), "tool_form": form, "tool_efficiency": 0.0}


def test_a_perfect_call_is_worth_4_and_a_redundant_one_lowers_efficiency():
    """3 + 1; efficiency 1 gold call of 1, 2 and 3 made: 1, 1/2, 1/3, weighted by .3."""
    assert sum(ToolRL().score(played(THINK + call("search", q="lake", k=3), gold=GOLD)).values()) == 4
    for repeats, share in [(1, 1), (2, 1 / 2), (3, 1 / 3)]:
        turns = [THINK + call("search", q="lake", k=3)] * repeats
        got = ToolRL(efficiency=0.3).score(played(*turns, THINK + "done", gold=GOLD))
        assert got["tool_efficiency"] == pytest.approx(0.3 * share, rel=1e-12) and got["tool_correct"] == 3


def test_each_gold_call_has_a_partner_of_its_own():
    """Two gold calls of one name: most = 1 + 2 + 2 = 5. One call made for both: name 1, then 1 + 1 for it: 6 * 3 / 5 - 3."""
    gold = [{"name": "add", "arguments": {"n": 1}}, {"name": "add", "arguments": {"n": 2}}]
    for made, value in [([1], 0.6), ([1, 2], 3.0), ([2, 1], 3.0), ([1, 1], 6 * 4 / 5 - 3)]:
        text = "".join(call("add", n=n) for n in made)
        assert ToolRL(think=False).score(played(text, gold=gold))["tool_correct"] == pytest.approx(value, rel=1e-12), made


def test_where_no_call_is_right():
    assert ToolRL().score(played(THINK + "hello", gold=[]))["tool_correct"] == 3
    got = ToolRL(efficiency=1.0).score(played(THINK + call("search"), gold=[]))
    assert got == {"tool_correct": -3, "tool_form": 1, "tool_efficiency": 0}


@pytest.mark.parametrize("gold", [None, "search", [{"arguments": {}}], {"name": "search"}])
def test_a_gold_that_is_no_list_of_calls(gold):
    with pytest.raises(VerifierError, match="verifier_gold: task 'task of e' has the gold .* list of calls"):
        ToolRL().score(played("x", gold=gold))
    with pytest.raises(RewardError, match="reward 'toolrl': form is -1.0"):
        ToolRL(form=-1.0)


# ------------------------------------------------------------------------------------------------- web state


STATE = '{"cart": {"items": [{"name": "lamp", "n": 2}], "open": false}, "user.id": 7}'


@pytest.mark.parametrize(("gold", "share"), [
    ({"cart.items.0.name": "lamp", "cart.items.0.n": 2, "user.id": 7}, 1),
    ({"cart.items.0.name": "lamp", "cart.items.0.n": 3, "user.id": 7}, 2 / 3),
    ({"cart.items.1.name": "lamp"}, 0), ({"cart.items.name": "lamp"}, 0), ({"cart.": 1, "nothing": None}, 0),
    ({"cart.open": False}, 1), ({"cart": {"items": [{"name": "lamp", "n": 2}], "open": False}}, 1),
])  # fmt: skip
def test_web_state(gold, share):
    episode = played("buy", "done", states=["{}", STATE], gold=gold)
    assert WebState(partial=True).score(episode) == {"web_state": pytest.approx(share)}
    assert WebState().score(episode) == {"web_state": float(share == 1)}


def test_a_state_that_cannot_be_read_is_a_failure():
    for state in ("page 3", "", "[1]"):
        with pytest.raises(VerifierError, match="verifier_setup: episode 'e': the state .* is no JSON"):
            WebState().score(played("done", states=[state], gold={"a": 1}))
    for gold in (None, {}, "lamp"):
        with pytest.raises(VerifierError, match="verifier_gold"):
            WebState().score(played("done", states=[STATE], gold=gold))


WANTED = {
    "name": "LED desk lamp", "attributes": ["led", "Dimmable"], "options": {"color": "red", "size": "large"}, "price": 15,
    "query": "lamp", "categories": ["home", "light", "desk"],
}  # fmt: skip


@pytest.mark.parametrize(("changes", "value"), [
    # All of 2 attributes, 2 options and the price: 1 * 5 / 5. Case and punctuation do not count, nor what it has besides.
    ({}, 1), ({"attributes": ["LED", "dimmable!", "cheap"], "options": {"Color": "Red", "size": "large", "plug": "uk"}}, 1),
    ({"attributes": ["led"], "options": {"color": "red"}, "price": 20}, 2 / 5),  # 1 + 1 + 0
    ({"price": 15.0}, 1), ({"price": 15.01}, 4 / 5), ({"options": {"color": "large", "size": "red"}}, 3 / 5), ({"attributes": []}, 3 / 5),
    ({"options": {}, "attributes": [], "price": 99}, 0),
    ({"name": "desk"}, 1),  # one word of three: 1/3 > .2
    ({"name": "table", "options": {}}, 0),  # no word of three: type 0
])  # fmt: skip
def test_web_store_by_hand(changes, value):
    """WebShop's formula: type * (attributes + options + price) / (2 + 2 + 1)."""
    bought = {**WANTED, "query": "other", "categories": [], **changes}
    states = ["{}", json.dumps({"bought": bought})]
    assert WebStore().score(played("buy", "done", states=states, gold=WANTED)) == {"web_store": pytest.approx(value, rel=1e-12)}


@pytest.mark.parametrize(("words", "more", "kind"), [
    # The wanted name has 12 words. Of them in common: 0, 1 (1/12 < .1), 2 (1/6, between), 3 (1/4 > .2).
    (0, {}, 0), (1, {}, 0.1), (2, {}, 0.5), (3, {}, 1),
    (2, {"query": "lamp"}, 1), (1, {"query": "lamp"}, 0.1), (2, {"query": None}, 0.5),
    (2, {"categories": ["desk", "home"]}, 1), (2, {"categories": ["desk", "garden"]}, 0.5), (0, {"categories": ["desk", "home"]}, 0),
])  # fmt: skip
def test_the_type_of_what_was_bought(words, more, kind):
    name = [f"w{i}" for i in range(12)]
    wanted = {**WANTED, "name": " ".join(name)}
    bought = {**WANTED, "name": " ".join([*name[:words], "z"]), "query": "", "categories": [], "attributes": ["led"], **more}
    state = json.dumps({"basket": bought})
    got = WebStore(at="basket", key="shop").score(played("done", states=[state], gold=wanted))
    assert got == {"shop": pytest.approx(kind * 4 / 5, rel=1e-12)}  # 1 attribute, 2 options and the price of 5


def test_web_store_without_a_purchase_and_what_it_cannot_grade():
    plain = {"name": "lamp", "price": 3}  # nothing but the price: 1 / 1
    assert WebStore().score(played("x", states=[json.dumps({"bought": plain})], gold=plain)) == {"web_store": 1}
    assert WebStore().score(played("x", states=["{}"], gold=WANTED)) == {"web_store": 0}
    assert WebStore().score(played(gold=WANTED)) == {"web_store": 0}
    for gold in (None, "lamp", {"name": "lamp"}, {"name": "!", "price": 3}, {**plain, "options": ["red"]}):
        with pytest.raises(VerifierError, match="verifier_gold: "):
            WebStore().score(played("x", states=["{}"], gold=gold))
    for state in ("page", "[]", '{"bought": 3}', '{"bought": {"name": "lamp", "price": "3"}}'):
        with pytest.raises(VerifierError, match="verifier_setup: episode 'e'"):
            WebStore().score(played("x", states=[state], gold=WANTED))


def test_verifiers_by_name_beside_one_another():
    specs = [{"name": "answer", "measure": "f1"}, {"name": "answer", "key": "exact"}, {"name": "research"}]
    (scored,), means = Scorer(specs)([played("<think>x</think><answer>fort</answer>", gold="red fort")])
    assert scored.rewards == {"answer": pytest.approx(2 / 3), "exact": 0.0, "research": pytest.approx(2 / 3)} == means
