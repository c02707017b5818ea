"""Names of the playground's random streams."""


class PlaygroundPurpose:
    """Names of random streams. A value is hashed into the counter, so that changing one changes all its numbers."""

    # Captions
    CAPTION = "caption"
    TASK = "caption task"
    CORRUPT_CAPTION = "spoiled"  # whether a scene contradicts its caption
    CORRUPTION_KIND = "how"
    WRONG_CAPTION = "spoil"  # what it shows instead
    # Scenes
    SNAP = "snap"  # whether sizes are few and positions on a grid
    SIZE = "size"
    QUADRANT_ORDER = "order"
    JITTER = "jitter"
    POSITION = "place"
    BACKGROUND = "background"
    # Edits
    EDIT = "edit"
    # Motion
    MOTION = "motion"
    CORRUPT_MOTION = "spoiled motion"
    WRONG_MOTION = "another motion"
    # Signs
    WORD = "word"
    CORRUPT_WORD = "spoiled word"
    WRONG_WORD = "another word"
    PSEUDOWORD_LENGTH = "length"
    PSEUDOWORD_LETTERS = "letters"
    SIGN = "sign"  # size, position and colors
    # Corruption of images
    PIXEL_NOISE = "noise"
    MASKED_BLOCKS = "blocks"
    AUGMENTATION = "augment"
    PREVIEW_KIND = "kind of preview"
    # Training of reward models
    OBJECTS = "jumble"
    MISCOUNT = "miscount"
    WRONG_COUNT = "so many"
    PREVIEW_STRENGTH = "how far"
    FLAW = "flaws"
    FLAW_STRENGTH = "how bad"
    QUALITY = "quality"
    NO_MOTION = "wrong"
    NO_MOTION_KIND = "way"
    OBJECT_MOTION = "at odds"  # of each object of a clip without a common motion
    FRAME_TIME = "clock"
    PACE = "pace"
    WRONG_FRAME = "mistake"
    CUT = "change"  # the frame from which on a clip shows something else
    NOISE_CLIP = "clouds"
    FLICKER = "flicker"
    GRAIN = "grain"
