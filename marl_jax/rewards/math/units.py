"""Units, currencies and number words after (or before) a quantity: `5 cm^2`, `\\$5`, `90^\\circ`, `5 million`.

Two spellings of one unit get one name: singular, unabbreviated, squares as `^2`. Words that are no known unit still
count as a unit if they look like a counted thing: a plural noun alone (12 apples) or before `per` or `of`, or a noun
after these. Anything else (5 at most, 2 negative) is no unit, which makes the complete answer a text.
"""

import re


def measure(text: str) -> tuple[str, str, int]:
    """The text before the unit, the unit's name ("" for none), and the factor of a number word."""
    body, unit, scale = text.strip(), "", 1
    if (match := _CURRENCY.match(body)) is not None:
        body = match["sign"] + _RATE.sub(" per ", body[match.end() :].strip())
        unit = _CURRENCIES[match["symbol"] or match["code"]]
    elif (match := _CURRENCY_AFTER.search(body)) is not None:
        return body[: match.start()], _CURRENCIES[match["symbol"]], 1
    elif (match := _DEGREES.search(body)) is not None and not _FUNCTION.search(body):
        return body[: match.start()].rstrip(), "degree" + match["scale"].upper(), 1
    elif (match := _OHMS.search(body)) is not None:
        return body[: match.start()].rstrip(), match["scale"] + "ohm", 1
    elif (match := _MICRO.search(body)) is not None:
        return body[: match.start()], "micro" + _singular(match["unit"]), 1
    elif (match := _CHINESE.search(body)) is not None:
        return body[: match.start()], _CHINESE_UNITS[match["unit"]].replace("-", " "), 1
    if not unit and (match := _COMPOUND.search(body)) is not None:
        quantity, name = body[: match.start()].rstrip(), _compound(match.group())
        if name and _QUANTITY.search(quantity) and not _WORD.search(quantity):
            return quantity, name, 1
    match = _UNIT.search(body)
    counted = _ADJECTIVE.sub("", match["word"]) if match else ""
    if match is None or not _is_measured(body[: match.start()], counted):
        return body, unit, 1
    words = counted.split()
    if words[0].lower() in _MULTIPLIERS:
        scale, words = _MULTIPLIERS[words[0].lower()], words[1:]
    name = _name(" ".join(words), int(match["exponent"] or 1))
    if unit and name.startswith("per "):  # $5 per hour
        unit, name = f"{unit} {name}", ""
    if unit and name not in ("", unit):  # $5 euros
        return text, "", 1
    return body[: match.start()].rstrip(), unit or name, scale


def agree(unit: str, other: str) -> bool:
    """Whether two units are equal. A unit, the "per" part of a price and the scale of degrees may be left out."""
    price, other_price = (name.partition(" per ")[0] for name in (unit, other))
    if price == other_price and price in _PRICES and price in (unit, other):
        return True
    degrees = "degree" in (unit, other) and {unit, other} <= {"degree", "degreeC", "degreeF"}
    return unit == other or degrees or not (unit and other)


def has_words(text: str) -> bool:
    """Whether an expression contains a word, which makes it a text; `xyz`, `mgh` and `nRT` are products."""
    return any(not (_PRODUCT.fullmatch(word) or _NO_WORD.fullmatch(word)) for word in _WORD.findall(text))


def _is_measured(quantity: str, unit: str) -> bool:
    return bool(
        _QUANTITY.search(quantity)
        and not _WORD.search(quantity)
        and not _PRODUCT.fullmatch(unit)
        and not (len(unit) == 1 and _VARIABLE.search(quantity))  # the h of \pi r^2 h is a variable
        and _is_unit(_JOIN.sub(" per ", unit).split())
    )


def _is_unit(words: list[str]) -> bool:
    if words[0].lower() in _MULTIPLIERS:
        words = words[1:]
        if not words:
            return True
    if words == ["times"]:  # alone, not in 5 times more
        return True
    if _NO_UNITS & {word.lower() for word in words} or words[0] == "of" or words[-1] in ("of", "per"):
        return False
    if _PLURAL.fullmatch(words[0]) and (
        len(words) == 1 or (words[1] in ("of", "per") and len(words[-1]) > 2)
    ):
        words = ["per", *words]  # a plural need not be known, like a noun after per; x is no noun
    names = [(before, word) for before, word in zip(["", *words], words) if _singular(word) not in _JOINTS]
    return bool(names) and all(before in ("of", "per") or _singular(word) in _KNOWN for before, word in names)


def _singular(word: str) -> str:
    name = word if len(word) <= 2 or word in _ALIASES else word.lower()  # an MPa is no mPa
    name = _ALIASES.get(name, name)
    if name in _KNOWN:  # a name that ends in s: series
        return name
    return name[:-1] if len(name) > 3 and name.endswith("s") and not name.endswith("ss") else name


def _compound(text: str) -> str:
    r"""The name of a product or quotient of units, kg\cdot m/s^2; "" if a factor is no known unit."""
    if not re.search(r"/|[A-Z]|[a-z]{2}", text.replace("\\cdot", "")):  # m \cdot g is a product of letters
        return ""
    factors = _FACTORS.findall(text)
    if not all(_singular(word) in _KNOWN for _, word, _ in factors):
        return ""
    return " ".join(
        ("per " if slash else "") + _name(word, int(power or 1)) for slash, word, power in factors
    )


def _name(words: str, exponent: int) -> str:
    names: list[str] = []
    next_power = 1  # of the next name only: square feet per second is not feet per second squared
    for name in map(_singular, _JOIN.sub(" per ", words).split()):
        if name in ("square", "cubic"):
            next_power = _POWERS[name]
        elif name in _POWERS:
            exponent = _POWERS[name]
        elif name != "of":
            names.append(name + (f"^{next_power}" if next_power != 1 else ""))
            next_power = 1
    return " ".join(names) + (f"^{exponent}" if exponent != 1 else "")


_CURRENCIES = {"¤": "dollar", "€": "euro", "£": "pound", "₹": "rupee", "¥": "yen", "¢": "cent"}
_CURRENCIES |= {"USD": "dollar", "EUR": "euro", "Rs": "rupee"}
_PRICES = {"dollar", "euro"}  # not pound, which is also a weight
_CURRENCY = re.compile(r"(?P<sign>-?)\s*(?:(?P<symbol>[¤€£₹¥])|(?P<code>USD|EUR|Rs)\b\.?(?= ?[\d\\]))\s*")
_CURRENCY_AFTER = re.compile(r"(?<=[\d}])\s*(?P<symbol>[¤€£₹¥¢])$")
_RATE = re.compile(r"(?<=\d)\s*/\s*(?=[A-Za-z]{2})")
_DEGREES = re.compile(
    r"\^\s*(?:\\circ|\{\s*\\circ\s*\})\s*(?P<scale>[CF]?)(?:(?<=C)elsius|(?<=F)ahrenheit)?$", re.I
)
_OHMS = re.compile(r"(?<=\d)\s*(?P<scale>[kM]?)\s*\\Omega$")
# Not N: 5 \mu N may be a force of friction.
_MICRO = re.compile(r"(?<=[\d}]) \\mu ?(?P<unit>[msLFHACTVJ]|Pa|eV|mol)$")
_FACTOR = r"[A-Za-z]{1,12}(?:\s*\^\s*(?:\d|\{\s*-?\d\s*\}))?"
_COMPOUND = re.compile(rf"(?<= ){_FACTOR}(?:\s*(?:\\cdot|/)\s*{_FACTOR}){{1,4}}\s*$")
_FACTORS = re.compile(r"(/?)\s*(?<!\\)\b([A-Za-z]+)(?:\s*\^\s*\{?\s*(-?\d))?")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_UNIT = re.compile(
    r"(?<![\\A-Za-z_{^])(?P<word>[A-Za-z]{2,20}(?:[ ./-]{1,3}[A-Za-z]{1,20}){0,5}"
    r"|(?<= )[mgslhLNJWVKACT](?:/[a-z]{1,20})?|[mg]/[a-z]{1,20})"
    r"\s*(?:\^\s*\{?\s*(?P<exponent>-?\d)\s*\}?)?\s*\.?$"
)
_ADJECTIVE = re.compile(
    r"^(?:(?:real|distinct|different|possible|ordered|unique|total|positive|fluid) )+(?=[A-Za-z]{2})"
    r"|(?<=s|t) (?:old|each|left|remaining|altogether|in total|total|away|long|tall|wide|high|deep)$"
)
_VARIABLE = re.compile(r"(?<![\\A-Za-z])(?![ei])[A-Za-z](?![A-Za-z])")
_QUANTITY = re.compile(r"(?:[\d)}\]!]|\\pi)\s*$")
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|(?:no|yes|is|of|or|if|mod)(?![A-Za-z]))", re.IGNORECASE)
_PRODUCT = re.compile(r"[w-z]{2,4}|abcd?")
# No vowel, or small and large letters mixed in a way that no word has.
_NO_WORD = re.compile(
    r"(?!csc|gcd|lcm|nth|sgn)[b-df-hj-np-tv-xz]{3,4}|(?![A-Z][a-z]+$)(?=.*[a-z])(?=.*[A-Z])[A-Za-z]{3,4}"
)
_POWERS = {"square": 2, "squared": 2, "cubic": 3, "cubed": 3}
_MULTIPLIERS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_MULTIPLIERS["trillion"] = 10**12

_JOIN = re.compile(r"[./-]+")
_JOINTS = {*_POWERS, "per", "of"}
_PLURAL = re.compile(r"[A-Za-z]+[A-RT-Za-rt-tv-z]s")
_NOT_NOUNS = """
    or and not to is mod if where for but than more less over no never none nor minus plus times only remainder base
    equals means gives yields makes leaves exceeds divides fails works holds exists has was does this thus perhaps
    always sometimes besides upwards downwards backwards forwards afterwards its his hers ours yours theirs
    zero one two three four five six seven eight nine ten eleven twelve hundred thousand million billion trillion dozen
    ones twos threes fours fives sixes sevens eights nines tens dozens hundreds thousands millions billions trillions
    half halves third thirds quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth
    ninths tenth tenths elevenths twelfths twentieths hundredth hundredths thousandth thousandths millionths billionths
    factorials percents negatives positives reciprocals
"""
_NO_UNITS = {*_NOT_NOUNS.split()}

_ABBREVIATIONS = """
    mm=millimeter cm=centimeter dm=decimeter m=meter km=kilometer nm=nanometer in=inch inches=inch ft=foot feet=foot
    yd=yard yds=yard mi=mile mg=milligram g=gram kg=kilogram lb=pound lbs=pound oz=ounce ms=millisecond s=second
    sec=second secs=second min=minute mins=minute h=hour hr=hour hrs=hour yr=year yrs=year l=liter L=liter
    ml=milliliter mL=milliliter sq=square cu=cubic metre=meter metres=meter centimetre=centimeter
    centimetres=centimeter kilometre=kilometer kilometres=kilometer litre=liter litres=liter usd=dollar deg=degree
    gal=gallon tsp=teaspoon tbsp=tablespoon wks=week mol=mole cal=calorie kcal=kilocalorie atm=atmosphere kpa=kilopascal
    kW=kilowatt kwh=kilowatthour khz=kilohertz mhz=megahertz ghz=gigahertz eV=electronvolt
    keV=kiloelectronvolt MeV=megaelectronvolt GeV=gigaelectronvolt Pa=pascal MPa=megapascal mA=milliampere
    rad=radian Hz=hertz N=newton J=joule W=watt V=volt K=kelvin kN=kilonewton kJ=kilojoule am=am pm=pm
    GPa=gigapascal mT=millitesla mV=millivolt kV=kilovolt mW=milliwatt pF=picofarad nF=nanofarad nC=nanocoulomb
    mH=millihenry pc=parsec kpc=kiloparsec Mpc=megaparsec arcsec=arcsecond arcmin=arcminute dB=decibel ly=lightyear
    people=person men=man women=woman children=child eur=euro Rs=rupee celsius=degreeC fahrenheit=degreeF
"""
_ALIASES = dict(pair.split("=") for pair in _ABBREVIATIONS.split())
UNIT_LETTERS = {letter: name for letter, name in _ALIASES.items() if len(letter) == 1}
# Not among UNIT_LETTERS, because \text{C} is also a choice.
SPACED_LETTERS = {"A": "ampere", "C": "coulomb", "T": "tesla", "F": "farad", "H": "henry"}
_ALIASES |= SPACED_LETTERS
_ALIASES |= {"mph": "mile per hour", "mpg": "mile per gallon"}
_ALIASES |= dict.fromkeys(("kph", "kmh"), "kilometer per hour")
_IN_CHINESE = """
    元=yuan 毫米=millimeter 厘米=centimeter 米=meter 千米=kilometer 公里=kilometer 平方厘米=centimeter^2
    平方米=meter^2 平方千米=kilometer^2 立方厘米=centimeter^3 立方米=meter^3 毫升=milliliter 升=liter 克=gram
    千克=kilogram 公斤=kilogram 吨=tonne 秒=second 分钟=minute 小时=hour 天=day 年=year 岁=year 度=degree
    分米=decimeter 角=角 分=分 倍=times 人=person 米/秒=meter-per-second 千米/时=kilometer-per-hour
    千米/小时=kilometer-per-hour 个 只 本 种 次 名 位 辆 条 张 支 件 块 盒 箱 袋 棵 台 家 枚 间
    头 匹 朵 场 户 页 层 段 组 套
"""
_CHINESE_UNITS = dict((pair if "=" in pair else f"{pair}={pair}").split("=") for pair in _IN_CHINESE.split())
_CHINESE = re.compile(rf"(?<=[\d)}}])\s*(?P<unit>{'|'.join(_CHINESE_UNITS)})$")
_COUNTED = """
    unit quart pint cup ton tonne acre hectare day month decade century night cent yen penny nickel dime peso yuan
    revolution rpm ohm megawatt bit byte kilobyte megabyte gigabyte mouse mice goose geese fish sheep deer dice series
    species way point solution root pair piece block student boy girl friend team game question problem page book box
    bag bottle ticket coin card ball egg apple orange cookie triangle circle digit number integer value term side edge
    vertex vertices face diagonal angstrom erg light ppm psi bpm
"""
_KNOWN = {*_ALIASES.values(), *_COUNTED.split()} - {*_JOINTS}
