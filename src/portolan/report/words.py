"""Numbers and states in words; the texts of the page that do not depend on the run."""

from dataclasses import dataclass

from portolan.report.facts import LEVELS, Forecast, Project, Run

MACRO_LOSS = "eval_dropless/heldout/macro_loss"
MACRO_BPB = "eval_dropless/heldout/macro_bpb"
MISSING = "–"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_BINARY_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def count(value: int | None) -> str:
    """Integer with thin spaces between thousands."""
    return MISSING if value is None else f"{value:,}".replace(",", "\u202f")


def loss(value: float | None, digits: int = 4) -> str:
    """Loss in nats with a fixed number of decimals."""
    return MISSING if value is None else f"{value:.{digits}f}"


def signed(value: float | None, digits: int = 4) -> str:
    """Difference with its sign, a true minus included."""
    return MISSING if value is None else f"{value:+.{digits}f}".replace("-", "−")


def scientific(value: float | None) -> str:
    """Four significant digits as a power of ten."""
    if value is None:
        return MISSING
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def percent(share: float | None, digits: int = 1) -> str:
    """Share as a percentage."""
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def size(num_bytes: int | None) -> str:
    """Bytes in binary units."""
    if num_bytes is None:
        return MISSING
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_BINARY_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{num_bytes} bytes" if unit == 0 else f"{value:.1f} {_BINARY_UNITS[unit]}"


def duration(seconds: float | None) -> str:
    """Seconds as seconds, minutes, hours or days."""
    if seconds is None:
        return MISSING
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"


def plural(number: int, noun: str) -> str:
    """`1 rung`, `3 rungs`."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


# ---------------------------------------------------------------- where the run stands


@dataclass(frozen=True)
class Step:
    """One stage of the project: `state` is done, now or next."""

    name: str
    state: str
    detail: str


@dataclass(frozen=True)
class Tile:
    """A number with its name and what it means."""

    name: str
    value: str
    note: str
    tone: str = ""


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison in words; `tone` is good, caution, bad or plain."""

    text: str
    tone: str


@dataclass(frozen=True)
class Headline:
    """Top of the page."""

    status: str
    sentence: str
    verdict: Verdict | None
    tiles: tuple[Tile, ...]
    notes: tuple[str, ...]


def metric_of_record(project: Project) -> str:
    """Metric of the forecast; without a forecast, the macro loss of the held-out text."""
    return (project.forecast.metric if project.forecast else "") or MACRO_LOSS


def measured_final(project: Project) -> float | None:
    """Loss of the finished target, by its own last evaluation, else by the score."""
    key = metric_of_record(project)
    value = project.target.final(key) if project.target else None
    if value is None and project.score:
        value = project.score.outcome
    return value


def ladder_share(project: Project) -> float | None:
    """Planned compute of all rungs over that of the target, on the axis of the forecast."""
    costs = [run.flops for run in project.rungs]
    target = project.target
    if not costs or target is None or not target.flops or any(c is None for c in costs):
        return None
    return sum(c for c in costs if c) / target.flops


def steps(project: Project) -> tuple[Step, ...]:
    """Stages in order, each with where it stands; none for runs that others trained."""
    if project.runs and all(run.role == "imported" for run in project.runs):
        return ()
    rungs, target = project.rungs, project.target
    finished = sum(run.finished for run in rungs)
    ladder_done = (bool(rungs) and finished == len(rungs)) or project.forecast is not None
    registered = any(entry.type == "registration" for entry in project.journal)
    started = target is not None and target.completed > 0
    done = target is not None and target.finished
    rows = [
        ("Corpus", project.corpus is not None,
         plural(len(project.corpus.sources), "source") if project.corpus else "not curated yet"),
        ("Ladder", ladder_done,
         f"{finished} of {plural(len(rungs), 'rung')} finished" if rungs else "no rung yet"),
        ("Forecast", project.forecast is not None,
         f"{loss(project.forecast.median(), 3)} nats per token" if project.forecast else "not yet"),
        ("Registration", registered,
         project.order_grade or ("sealed" if registered else "not sealed")),
        ("Target", done,
         f"{percent(target.fraction, 0)} of the run" if target and started else "not started"),
        ("Score", project.score is not None, "scored" if project.score else "not scored"),
    ]  # fmt: skip
    states, current = [], True
    for name, is_done, detail in rows:
        state = "done" if is_done else "now" if current else "next"
        current = current and is_done
        states.append(Step(name, state, detail))
    return tuple(states)


def interval_text(forecast: Forecast, level: int, mark: float = 1.0, digits: int = 4) -> str:
    """`2.3012 to 2.3380`, or a dash."""
    ends = forecast.interval(level, mark)
    return f"{loss(ends[0], digits)} to {loss(ends[1], digits)}" if ends else MISSING


def verdict(forecast: Forecast, value: float, mark: float = 1.0) -> Verdict:
    """Smallest shown interval that holds the value."""
    for level in (*LEVELS, 99):
        ends = forecast.interval(level, mark)
        if ends and ends[0] <= value <= ends[1]:
            tone = "caution" if level == 99 else "good"
            where = f"inside the {level} % interval"
            return Verdict(where if level < 99 else "outside the 95 % interval", tone)
    if forecast.interval(95, mark) is None:
        return Verdict("the forecast has no interval", "plain")
    return Verdict("far outside the 95 % interval", "bad")


def headline(project: Project) -> Headline:
    """Sentence, verdict and tiles for whatever stage the project is in."""
    forecast, target = project.forecast, project.target
    final = measured_final(project)
    if forecast is None:
        return _headline_before(project)
    models = plural(len(project.rungs), "small model")
    sentence = (
        f"{models} were trained to forecast the large one, the target. The forecast of its loss "
        f"on held-out text is {loss(forecast.median(), 3)} nats per token, and gives 95 % "
        f"probability to values from {interval_text(forecast, 95, digits=3)}. "
    )
    if final is not None:
        judged = verdict(forecast, final) if comparable(project) else None
        error = final - (forecast.median() or final)
        sentence += f"After training, the measured loss is {loss(final, 3)}"
        if judged:
            side = "above" if error >= 0 else "below"
            sentence += f": {loss(abs(error), 3)} {side} the median, {judged.text}"
        status, sentence = "Finished", sentence + "."
    elif target is not None and target.completed:
        status, judged, text = _running(project, forecast, target)
        sentence += text
    else:
        status, judged = "Waiting for the target", None
        sentence += "The target has not started, so there is nothing to compare it with yet."
    return Headline(status, sentence, judged, _tiles(project, final), _notes(project))


def comparable(project: Project) -> bool:
    """Whether measured values may be held against the forecast; void or unverified ones not."""
    return not (project.score and (project.score.is_void or project.score.is_unverified))


def _running(project: Project, forecast: Forecast, target: Run) -> tuple[str, Verdict | None, str]:
    """Status, verdict at the newest mark and a sentence for a target that is not finished."""
    status = f"Training, {percent(target.fraction, 0)} of the run"
    latest = target.latest(forecast.metric)
    if latest is None or not target.num_steps:
        return status, None, "The target is running and has not been evaluated yet."
    mark = round(latest.completed / target.num_steps, 2)
    text = f"At {percent(mark, 0)} of the run the measured loss is {loss(latest.value, 3)}"
    if not comparable(project) or forecast.median(mark) is None:
        return status, None, text + "."
    judged = verdict(forecast, latest.value, mark)
    return status, judged, f"{text}, {judged.text} forecast for this point of the run."


def _headline_before(project: Project) -> Headline:
    rungs = project.rungs
    if rungs:
        finished = sum(run.finished for run in rungs)
        status = "Rehearsing"
        sentence = (
            f"The corpus is ready and {finished} of {plural(len(rungs), 'rung')} of the ladder "
            f"{'is' if finished == 1 else 'are'} finished. Once all small models are trained, "
            "their losses give a forecast for the large one."
        )
    elif project.corpus:
        status = "Corpus ready"
        sentence = (
            "The text is curated and tokenised; no model is trained yet. Next come the small "
            "models of the ladder, which give a forecast for the large one."
        )
    elif imported := [run for run in project.runs if run.role == "imported"]:
        status = "Observed"
        sentence = (
            f"{plural(len(imported), 'run')} of another tracker, as it was recorded there. What "
            "is shown is what the source gave; Portolan did not train it."
        )
    else:
        status, sentence = "Empty", "This project has neither a corpus nor a run yet."
    return Headline(status, sentence, None, _tiles(project, None), _notes(project))


def _tiles(project: Project, final: float | None) -> tuple[Tile, ...]:
    forecast, target, corpus = project.forecast, project.target, project.corpus
    tiles = []
    if forecast:
        tiles.append(
            Tile("Forecast", loss(forecast.median()), "median, nats per token; lower is better")
        )
        for level in LEVELS:
            tiles.append(
                Tile(
                    f"{level} % interval",
                    interval_text(forecast, level).replace(" to ", " – "),
                    "nats per token",
                )
            )
    if final is not None:
        note = "nats per token, after the last update"
        tiles.append(Tile("Measured", loss(final), note, "measured"))
        if forecast and (median := forecast.median()) and comparable(project):
            share = percent((final - median) / final, 2).replace("-", "−")
            note = f"measured − median; {share} of the loss"
            tiles.append(Tile("Error", signed(final - median), note))
    elif target and target.num_steps and (latest := target.latest(metric_of_record(project))):
        note = f"nats per token, at {percent(latest.completed / target.num_steps, 0)} of the run"
        tiles.append(Tile("Measured so far", loss(latest.value), note, "measured"))
    if (share := ladder_share(project)) is not None:
        tiles.append(Tile("Cost of the ladder", percent(share), "of the target's planned compute"))
    if target and target.total_parameters:
        size_note = f"active for each token, of {_short(target.total_parameters)} in all"
        tiles.append(Tile("Parameters", _short(target.active_parameters), size_note))
    if corpus and corpus.unigram_macro is not None:
        note = "nats per token of a model that knows only how frequent each token is"
        tiles.append(Tile("Unigram reference", loss(corpus.unigram_macro), note))
    return tuple(tiles)


def _short(value: int | None) -> str:
    if value is None:
        return MISSING
    for unit, length in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if value >= length:
            return f"{value / length:.2f} {unit}"
    return count(value)


def _notes(project: Project) -> tuple[str, ...]:
    notes = []
    forecast = project.forecast
    if project.score and project.score.is_void:
        notes.append(
            "The forecast is void: the run left the registered conditions, so its values are not "
            "compared with the forecast."
        )
    elif project.score and project.score.is_unverified:
        notes.append(
            "The registered conditions could not be checked, so no difference from the forecast "
            "is shown."
        )
    if project.order_grade == "retrospective" or (forecast and forecast.retrospective):
        notes.append(
            "The registration was written after the target had started. It is retrospective and "
            "counts as a description, not as a prediction."
        )
    if forecast and forecast.evaluations_known_before:
        notes.append(
            f"{plural(forecast.evaluations_known_before, 'evaluation')} of the target were known "
            "when this forecast was made."
        )
    if len(project.forecasts) > 1:
        notes.append(
            f"This is the newest of {len(project.forecasts)} forecasts; the earlier ones stay in "
            "the record and are scored as well."
        )
    capped = [run.label for run in project.rungs if run.rate_capped]
    if capped:
        notes.append(f"The learning rate of {', '.join(capped)} was held by its upper limit.")
    return tuple(notes)


# ---------------------------------------------------------------- fixed texts

LIMITS: tuple[tuple[str, str], ...] = (
    ("A hash proves sameness, not truth.",
     "It shows that a file has not changed since it was recorded. It cannot show that what was "
     "recorded was right or honest."),
    ("The order of entries needs a witness.",
     "That a forecast stands before the first attempt in the journal proves little to a stranger "
     "unless somebody outside saved the journal's head at the time."),
    ("A shortened journal looks complete.",
     "Lines cut from the end, or a journal written anew from the start, are found only against a "
     "head that somebody else holds."),
    ("Times and metrics are self-reported.",
     "They come from the machine that ran the training."),
    ("A sample says nothing about extremes.",
     "Curves here are condensed; a point may stand for many rows. The full rows lie in the "
     "project folder."),
    ("One run is about one test of the forecast.",
     "The evaluations along a run depend on each other; twenty of them inside the band are not "
     "twenty successes."),
    ("A small run does not show that the method scales.",
     "Losses, rates and shapes of small models on short text say nothing certain about large "
     "ones, nor about general English if the corpus is code and technical prose."),
    ("Bit-for-bit resume is claimed for one build on CPU.",
     "Other processors, devices and library versions may round differently."),
)  # fmt: skip

GLOSSARY: tuple[tuple[str, str], ...] = (
    ("Active parameters",
     "The parameters that one token passes through, without the embedding and the output head, "
     "norms, gates and convolutions. In a mixture of experts they are a small part of all."),
    ("Bits per byte",
     "Loss in bits divided by the bytes of the text. Unlike loss per token it does not depend on "
     "the tokenizer, so it can be compared between models."),
    ("Compute (FLOPs)",
     "Arithmetic operations of training, counted by formula: three times the forward pass, "
     "attention priced without the causal saving, output head left out, times the tokens. "
     "Other conventions give other numbers; this one is the axis of the forecast."),
    ("Dropless",
     "Evaluated so that no token is turned away by a full expert."),
    ("Entropy of the load",
     "How evenly the tokens spread over the experts of a layer, in nats. The largest possible "
     "value, the logarithm of the number of experts, means that all get the same."),
    ("Forecast interval",
     "A 95 % interval is a range that the forecast gives 95 % probability. Good forecasts have "
     "narrow intervals that hold the truth as often as they say."),
    ("Held-out text",
     "Documents set aside before training. No model read them, so the loss on them shows what was "
     "learned and not what was memorised."),
    ("Ladder, rung",
     "Small models built by the recipe of the target and trained first. Each is a rung; their "
     "losses are extended to the size of the target."),
    ("Load, max over mean",
     "Tokens sent to the busiest expert of a layer, divided by the average expert's. "
     "1 is perfect balance."),
    ("Loss",
     "Mean of −log(probability that the model gave to the next token), in nats, that is with the "
     "natural logarithm. 0 would be certainty."),
    ("Macro, micro",
     "Macro: every domain of the text counts the same. Micro: every token counts the same."),
    ("Mixture of experts",
     "A network whose layers hold many small networks, the experts; a router sends each token to a "
     "few of them."),
    ("Norm",
     "Length of all numbers of a tensor taken as one vector. Some tensors are held at a constant "
     "norm by the optimizer; for them any change is a fault."),
    ("Order grade",
     "How well it is shown that the forecast came first. Witnessed: somebody outside dated it. "
     "Chained: only its place in the journal shows it. Retrospective: it came later."),
    ("Registration",
     "The plan and the forecast, written into the journal with what will count as failure."),
    ("Token",
     "A piece of text, often a word or a part of one; the unit a model reads and predicts."),
    ("Unigram reference",
     "Loss of a model that ignores context and knows only the frequency of each token. A model has "
     "learned language beyond word counts when its loss lies well below."),
)  # fmt: skip
