package codeqweb

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"codeq"
)

// visible returns untrusted text for display: invalid, invisible and direction-changing characters
// become escapes. html/template escapes the rest. A joiner between two visible characters is a part
// of them, as in an emoji or a Persian word.
func visible(s string) string {
	clean := true
	for _, c := range s {
		if c == utf8.RuneError || hidden(c) {
			clean = false
			break
		}
	}
	if clean {
		return s
	}
	var b strings.Builder
	shown := false // the character before is
	for len(s) > 0 {
		c, size := utf8.DecodeRuneInString(s)
		was := shown
		switch shown = false; {
		case c == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case !hidden(c):
			b.WriteString(s[:size])
			shown = !unicode.IsSpace(c)
		case (c == zeroWidthJoiner || c == zeroWidthNonJoiner) && was && joins(s[size:]):
			b.WriteString(s[:size])
		case c < 0x100:
			fmt.Fprintf(&b, `\x%02x`, c)
		case c < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, c)
		default:
			fmt.Fprintf(&b, `\U%08x`, c)
		}
		s = s[size:]
	}
	return b.String()
}

const zeroWidthNonJoiner, zeroWidthJoiner = '\u200c', '\u200d'

// joins reports whether a text begins with a character that a joiner can join.
func joins(s string) bool {
	c, size := utf8.DecodeRuneInString(s)
	return size > 0 && c != utf8.RuneError && c > unicode.MaxASCII && !hidden(c) && !unicode.IsSpace(c)
}

// field returns text for a field of a form; "" if visible would change it, since the form would
// send the changed text back.
func field(s string) string {
	if visible(s) != s {
		return ""
	}
	return s
}

// hidden reports whether a character is invisible: controls, direction marks, joiners, unassigned
// characters. Line ends and tabs are visible in a payload.
func hidden(c rune) bool {
	return c != '\n' && c != '\t' && c != ' ' && !unicode.IsPrint(c)
}

// clip shortens a text to about n bytes, at a character boundary.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// line returns a text in one line, clipped for a table.
func line(s string) string {
	return visible(strings.Join(strings.Fields(clip(s, 160)), " "))
}

// shownPayload bounds the payload on a page, in bytes.
const shownPayload = 64 << 10

// payloadView is a payload on a page.
type payloadView struct {
	Text  string
	Kind  string // "JSON", "text", "binary", "formatted"
	Bytes int
	Cut   bool   // there is more
	All   string // a link to all of it, if the page has no other
}

// payload formats a payload or a result.
func (d *Dashboard) payload(queue string, data []byte) payloadView {
	v := payloadView{Bytes: len(data)}
	if text := d.format(queue, data); text != "" {
		v.Kind, v.Text, v.Cut = "formatted", clip(text, shownPayload), len(text) > shownPayload
		v.Text = visible(v.Text)
		return v
	}
	switch {
	case len(data) == 0:
		v.Kind = "empty"
	case json.Valid(data):
		var b bytes.Buffer
		v.Kind = "JSON"
		if len(data) <= shownPayload && indented(data) <= 4*shownPayload && json.Indent(&b, data, "", "  ") == nil {
			v.Text = b.String()
			break
		}
		v.Text, v.Cut = begin(data), len(data) > shownPayload
	case utf8.Valid(data):
		v.Kind, v.Text, v.Cut = "text", begin(data), len(data) > shownPayload
	default:
		v.Kind, v.Cut = "binary", len(data) > shownPayload/16
		v.Text = hex.Dump(data[:min(len(data), shownPayload/16)])
	}
	v.Text = visible(v.Text)
	return v
}

// begin returns the part of a payload that is shown.
func begin(data []byte) string {
	return clip(string(data[:min(len(data), shownPayload+1)]), shownPayload)
}

// indented estimates the size of valid JSON after indentation, in bytes: deep values grow many
// times.
func indented(data []byte) int {
	total, depth, text := len(data), 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case text:
		case c == '{' || c == '[':
			depth++
			total += 1 + 2*depth
		case c == ',':
			total += 1 + 2*depth
		case c == '}' || c == ']':
			depth--
			total += 1 + 2*depth
		}
	}
	return total
}

// number formats an integer with commas.
func number(v any) string {
	s := fmt.Sprint(v)
	sign := ""
	if strings.HasPrefix(s, "-") {
		sign, s = "-", s[1:]
	}
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return sign + s
}

// short is the end of an ID.
func short(id codeq.ID) string { return "…" + id.String()[28:] }

// rate formats a rate per second.
func rate(perSecond float64) string {
	switch {
	case perSecond == 0:
		return "0"
	case perSecond < 0.1:
		return "<0.1"
	case perSecond < 9.95:
		return strconv.FormatFloat(perSecond, 'f', 1, 64)
	default:
		return number(int64(perSecond + 0.5))
	}
}

// size formats a number of bytes with a unit.
func size(bytes int64) string {
	const units = "KMGTPE"
	if bytes < 1024 {
		return fmt.Sprint(bytes, " B")
	}
	f, unit := float64(bytes)/1024, 0
	for f >= 1024 && unit < len(units)-1 {
		f, unit = f/1024, unit+1
	}
	return fmt.Sprintf("%.1f %ciB", f, units[unit])
}

// span formats a duration to about two digits.
func span(d time.Duration) string {
	switch {
	case d == codeq.Forever:
		return "forever"
	case d < 0:
		return "-" + span(-max(d, -math.MaxInt64)) // the minimum has no opposite
	case d == 0:
		return "0 s"
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%.1f h", d.Hours())
	default:
		return fmt.Sprintf("%d days", int(d.Hours()/24))
	}
}

// spanYears is slightly less than the maximum of a time.Duration, in years.
const spanYears = 290

// between formats the duration from one time to a later one.
func between(from, to time.Time) string {
	if years := to.Year() - from.Year(); years > spanYears {
		return number(years) + " years"
	}
	return span(to.Sub(from))
}

// distance formats the time from or until now.
func distance(t time.Time) string {
	switch now := time.Now(); {
	case t.IsZero():
		return "–"
	case t.After(now):
		return "in " + between(now, t)
	default:
		return between(t, now) + " ago"
	}
}

// age formats the time since t.
func age(t time.Time) string { return between(t, latest(t, time.Now())) }

// clock formats the time of a day.
func clock(t time.Time) string { return t.UTC().Format("15:04:05.000") }
