#!/bin/sh
# Makes data/kjv.txt again, from Debian's packages bible-kjv and bible-kjv-text (version 4.38).
# Needs apt-get, dpkg, awk and sha256sum. Installs nothing. Text other than that of version 4.38 is refused, and
# data/kjv.txt stays as it is, since losses in the documentation and tests are those of that text.
set -eu
sha256=dbd05e2e52ecd8fa20be8da9c0eac0dbe2fb8744939cb37cc454686e241bdb02
out=$(cd "$(dirname "$0")/.." && pwd)/data/kjv.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt-get download bible-kjv bible-kjv-text
for package in ./*.deb; do dpkg -x "$package" root; done

# `bible` finds its text in the folder that it is called from.
cd root/usr/lib
# No pipe, whose status would be that of awk alone.
../bin/bible -f gen1:1-rev22:21 > "$work/verses"
awk '
    BEGIN {
        split("Genesis,Exodus,Leviticus,Numbers,Deuteronomy,Joshua,Judges,Ruth,1 Samuel,2 Samuel,1 Kings,2 Kings," \
            "1 Chronicles,2 Chronicles,Ezra,Nehemiah,Esther,Job,Psalms,Proverbs,Ecclesiastes,Song of Solomon," \
            "Isaiah,Jeremiah,Lamentations,Ezekiel,Daniel,Hosea,Joel,Amos,Obadiah,Jonah,Micah,Nahum,Habakkuk," \
            "Zephaniah,Haggai,Zechariah,Malachi,Matthew,Mark,Luke,John,Acts,Romans,1 Corinthians,2 Corinthians," \
            "Galatians,Ephesians,Philippians,Colossians,1 Thessalonians,2 Thessalonians,1 Timothy,2 Timothy,Titus," \
            "Philemon,Hebrews,James,1 Peter,2 Peter,1 John,2 John,3 John,Jude,Revelation", names, ",")
    }
    # A line is "Ge1:1 In the beginning …": the book and chapter become a heading, a verse stays a line.
    {
        place = $1
        sub(/:.*/, "", place)
        abbreviation = place
        sub(/[0-9]+$/, "", abbreviation)
        if (abbreviation != book) { book = abbreviation; number++ }
        if (place != chapter) {
            if (chapter != "") print ""
            chapter = place
            print names[number] " " substr(place, length(abbreviation) + 1)
            print ""
        }
        sub(/^[^ ]+ /, "")
        print
    }
' "$work/verses" > "$work/kjv.txt"
echo "$sha256  $work/kjv.txt" | sha256sum --check --quiet
# Renamed within its folder, so that it is replaced as a whole or not at all.
cp "$work/kjv.txt" "$out.partial"
mv "$out.partial" "$out"
wc -c "$out"
