"""Words that are single tokens in the demo checkpoint."""

SPOKEN = tuple(
    """
    a about above across after again air all almost along also always am an and animal another answer any apple are
    around as ask at autumn away baby back bag ball bank be beach bear beautiful because bed bee before begin behind
    bell below best better between big bird black blue boat book both box boy branch bread break bridge bright bring
    brook brother brown build bus busy but butter by cake call calm came camera can candle car carry cat chair
    change child city clear climb clock close cloud coat coffee cold color come cook corn corner could count country
    cow cup cut dance dark day deep deer desk did dinner do does dog door down draw dream drink drive dry duck early
    earth east easy eat egg eight end enough even evening ever every eye face fall family far farm fast father feel
    few field find fine fire first fish five flag floor flower fly follow food foot for forest found four fox free
    friend from fruit full game garden gave gentle get girl give glad glass go gold good grass great green grow
    guitar had half hand happy hard harbor has hat have he hear heart heavy hello help her here high hill him his
    hold home honey hope horse hot hour house how hundred ice idea if in inside into is island it its join jump just
    keep kind kitchen know lake lamp land large last late laugh leaf learn leave left lemon less letter light like
    line lion listen little live long look loud love low lunch made make man many map market may me meadow meet milk
    mind minute mirror moon more morning most mother mountain mouse move much music my name near never new next
    night nine north not note now ocean of off often old on once one only open orange or other our out over own page
    paint paper park part path peace pen people picture piece place plane plant play please pocket pond quick quiet
    rabbit radio rain read ready red rest rice ride right ring river road rock room root rose round run sail salt
    same sand saw say school sea season see seed send seven shade she sheep shell ship shoe shop short show silver
    simple sing sister sit six sky sleep slow small smile snow so soft some song soon sound soup south speak spring
    square stand star start stay step still stone stop store storm story street strong sugar summer sun sure sweet
    swim table take talk tall tea tell ten than thank that the their them then there they thing think this three
    through time to today together tomorrow tone too top touch town train tree true turn two under until up us use
    valley very village violin visit voice wait walk wall want warm was watch water wave way we well were west what
    wheat wheel when where while white who why wide will wind window winter wish with wolf wonder wood word work
    world would write year yellow yes yet you young your zebra
    """.split()  # noqa: SIM905
)
"""Lower-case words; with a leading space each is one token, and only these (and `PUNCTUATION`) are ever
generated."""

PUNCTUATION = (".", ",")

PROMPTED = tuple(
    """
    Alibaba Group Qwen Team assistant auditory capable developed generating happens helpful human image inputs
    perceiving speech text video audio virtual visual sentence colour words
    """.split()  # noqa: SIM905
)
"""Words of usual prompts, including the speech system prompt: one token each, never generated."""

BARE = tuple(
    """
    system user assistant You What Describe Say Hello Count Tell How Please hello count the
    """.split()  # noqa: SIM905
)
"""Words that begin a line and thus lack a space: one token each, as the chat template's roles must be."""
