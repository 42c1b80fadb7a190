"""Reads pages: tags closed in order, ids, addresses, scripts, text."""

from html.parser import HTMLParser

VOID = {"meta", "br", "link", "input"}


class Checker(HTMLParser):
    """Checks that tags are closed in order, and collects tags, ids, addresses and the text of scripts."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.addresses, self.scripts, self.words = [], [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        self.ids += [value for name, value in attrs if name == "id"]
        self.scripts += [""] if tag == "script" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
        else:
            self.words.append(data)


def parse(text):
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    return checker
