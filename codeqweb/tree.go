package codeqweb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"strings"
	"unicode/utf8"
)

// The bounds of a payload as a tree.
const (
	treeBytes = 96 << 10 // of its HTML; a value may exceed it by treeText
	treeText  = 2 << 10  // of one text
	treeItems = 100      // of one array or object
	treeDepth = 32
	treeOpen  = 2 // levels that are open
)

// treeView is a payload or a result on the page of a task.
type treeView struct {
	payloadView
	Tree template.HTML // instead of Text; "": it is no JSON with parts
	URL  string        // of all of it
}

// tree formats a payload or a result, JSON as a tree.
func (d *Dashboard) tree(queue string, data []byte) treeView {
	v := treeView{payloadView: d.payload(queue, data)}
	if v.Kind == "JSON" {
		if html, cut := treeOf(data); html != "" {
			v.Tree, v.Cut = html, cut
		}
	}
	return v
}

// treeWriter writes a JSON value as nested parts. It passes over the rest byte by byte, without
// decoding it: a page with a large payload is loaded again and again.
type treeWriter struct {
	out  bytes.Buffer
	json []byte // valid JSON, from the next value on
	cut  bool   // something is left out
}

// errInexact: a text of the JSON is no Go string, such as half of a surrogate pair.
var errInexact = errors.New("not exact")

// treeOf returns valid JSON as HTML; "": it is no array and no object, or a tree could not show all
// of its texts as they are.
func treeOf(data []byte) (text template.HTML, cut bool) {
	if start := bytes.TrimSpace(data); len(start) == 0 || start[0] != '{' && start[0] != '[' {
		return "", false
	}
	t := treeWriter{json: data}
	if err := t.value("", 0); err != nil {
		return "", false
	}
	return template.HTML(t.out.String()), t.cut //nolint:gosec // all texts are escaped
}

// next returns the first byte of the next value or delimiter, without taking it.
func (t *treeWriter) next() byte {
	t.json = bytes.TrimLeft(t.json, " \t\r\n")
	return t.json[0]
}

// value writes the next value. name is the HTML of its key.
func (t *treeWriter) value(name string, depth int) error {
	switch first := t.next(); first {
	case '{', '[':
		return t.nested(name, depth, first)
	case '"':
		text, err := t.text()
		t.leaf(name, "text", `"`+text+`"`)
		return err
	case 't', 'f', 'n':
		t.leaf(name, "word", string(t.skip()))
	default:
		t.leaf(name, "number", t.clip(string(t.skip())))
	}
	return nil
}

// text takes a text, and returns its beginning.
func (t *treeWriter) text() (text string, err error) {
	const most = 12 * treeText // bytes that are decoded: an escape of one byte has six
	t.next()
	raw, n := t.skip(), 1
	if len(raw) > most {
		for n < most {
			switch {
			case raw[n] != '\\':
				n++
			case raw[n+1] == 'u':
				n += 6
			default:
				n += 2
			}
		}
		for !utf8.RuneStart(raw[n]) {
			n--
		}
		raw = append(raw[:n:n], '"')
	}
	if err := json.Unmarshal(raw, &text); err != nil {
		return "", err
	}
	if n > 1 {
		text = strings.TrimSuffix(text, string(utf8.RuneError)) // perhaps half of a pair
	}
	if strings.ContainsRune(text, utf8.RuneError) {
		return "", errInexact
	}
	return t.clip(text), nil
}

func (t *treeWriter) clip(text string) string {
	t.cut = t.cut || len(text) > treeText
	return clip(text, treeText)
}

func (t *treeWriter) leaf(name, class, text string) {
	fmt.Fprintf(&t.out, `<div class="leaf">%s<bdi class="value %s">%s</bdi></div>`, name, class, template.HTMLEscapeString(visible(text)))
}

// nested writes an array or an object, and counts the parts that it leaves out.
func (t *treeWriter) nested(name string, depth int, begin byte) error {
	open, many := "", "items"
	if depth < treeOpen {
		open = " open"
	}
	if begin == '{' {
		many = "keys"
	}
	// The number of parts is known at the end: it is put in there.
	fmt.Fprintf(&t.out, `<details%s><summary>%s`, open, name)
	at := t.out.Len()
	t.out.WriteString(`</summary>`)
	n, left := 0, 0
	for t.json = t.json[1:]; t.next() != begin+2; n++ { // "}" is two after "{", as "]" is after "["
		if t.json[0] == ',' {
			t.json = t.json[1:]
			t.next()
		}
		shows, key, err := n < treeItems && t.out.Len() <= treeBytes && depth < treeDepth, "", error(nil)
		if begin == '{' {
			if shows {
				key, err = t.text()
			} else {
				t.skip()
			}
			t.next()
			t.json = t.json[1:] // the colon
			t.next()
		}
		switch {
		case err != nil:
			return err
		case !shows:
			left++
			t.skip()
			continue
		case begin == '{':
			key = `<bdi class="prop">` + template.HTMLEscapeString(visible(key)) + `</bdi>`
		default:
			key = fmt.Sprintf(`<span class="prop index">%d</span>`, n)
		}
		if err := t.value(key, depth+1); err != nil {
			return err
		}
	}
	t.json = t.json[1:]
	if left > 0 {
		t.cut = true
		fmt.Fprintf(&t.out, `<p class="left">%s more are not shown</p>`, number(left))
	}
	t.out.WriteString(`</details>`)
	if n == 1 {
		many = strings.TrimSuffix(many, "s")
	}
	rest := string(t.out.Bytes()[at:])
	t.out.Truncate(at)
	fmt.Fprintf(&t.out, `<span class="size">%s %s</span>%s`, number(n), many, rest)
	return nil
}

// skip takes the next value as it is.
func (t *treeWriter) skip() []byte {
	depth, text := 0, false
	for i := 0; i < len(t.json); i++ {
		switch c := t.json[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			if text = !text; !text && depth == 0 {
				return t.take(i + 1)
			}
		case text:
		case c == '{' || c == '[':
			depth++
		case depth == 0 && (c == ',' || c == '}' || c == ']' || c == ' ' || c == '\t' || c == '\r' || c == '\n'):
			return t.take(i)
		case c == '}' || c == ']':
			if depth--; depth == 0 {
				return t.take(i + 1)
			}
		}
	}
	return t.take(len(t.json))
}

func (t *treeWriter) take(n int) []byte {
	taken := t.json[:n]
	t.json = t.json[n:]
	return taken
}
