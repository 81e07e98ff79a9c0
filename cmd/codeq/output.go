package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/mattn/go-runewidth"
	"golang.org/x/term"
)

// line writes a line of text. All of it is escaped.
func (a *app) line(format string, args ...any) error {
	_, err := fmt.Fprintln(a.out, safe(fmt.Sprintf(format, args...)))
	return err
}

// note writes a message to the standard error.
func (a *app) note(format string, args ...any) {
	_, _ = fmt.Fprintln(a.err, safeLines(fmt.Sprintf(format, args...))) // cannot be reported
}

// json writes a value as one line.
func (a *app) json(v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := a.out.Write(safeJSON(b.Bytes()))
	return err
}

// result writes JSON or a line of text.
func (a *app) result(v any, format string, args ...any) error {
	if a.asJSON {
		return a.json(v)
	}
	return a.line(format, args...)
}

// table is a table of text. The titles of columns of numbers begin with ">".
type table struct {
	titles []string
	rows   [][]string
}

func newTable(titles ...string) *table { return &table{titles: titles} }

// add adds a row, and escapes its cells.
func (t *table) add(cells ...any) {
	row := make([]string, len(cells))
	for i, c := range cells {
		row[i] = safe(fmt.Sprint(c))
	}
	t.rows = append(t.rows, row)
}

// lines returns the lines of the table, the titles first.
func (t *table) lines() []string {
	widths := make([]int, len(t.titles))
	right := make([]bool, len(t.titles))
	titles := make([]string, len(t.titles))
	for i, title := range t.titles {
		titles[i], right[i] = strings.CutPrefix(title, ">")
	}
	all := append([][]string{titles}, t.rows...)
	for _, row := range all {
		for i, cell := range row {
			widths[i] = max(widths[i], runewidth.StringWidth(cell))
		}
	}
	lines := make([]string, len(all))
	for n, row := range all {
		var b strings.Builder
		for i, cell := range row {
			if i > 0 {
				b.WriteString("  ")
			}
			pad := strings.Repeat(" ", widths[i]-runewidth.StringWidth(cell))
			if right[i] {
				b.WriteString(pad + cell)
			} else {
				b.WriteString(cell + pad)
			}
		}
		lines[n] = strings.TrimRight(b.String(), " ")
	}
	return lines
}

func (a *app) table(t *table) error {
	_, err := io.WriteString(a.out, strings.Join(t.lines(), "\n")+"\n")
	return err
}

// field is a name and a value of a description.
type field struct {
	name  string
	value any
}

// fields writes a description, one field a line. Empty values are left out.
func (a *app) fields(fields []field) error {
	width := 0
	for _, f := range fields {
		width = max(width, len(f.name))
	}
	for _, f := range fields {
		text := safe(fmt.Sprint(f.value))
		if text == "" {
			continue
		}
		if _, err := fmt.Fprintf(a.out, "%-*s  %s\n", width, f.name, text); err != nil {
			return err
		}
	}
	return nil
}

// clip shortens text for a table to a number of terminal cells.
func clip(s string, cells int) string { return runewidth.Truncate(safe(s), cells, "...") }

// payloadCells is the width of a payload or an error in a table.
const payloadCells = 60

// clipBytes is clip for a payload. It reads the first bytes only.
func clipBytes(b []byte, cells int) string {
	if len(b) > 4*cells {
		b = append(bytes.Clone(b[:4*cells]), "..."...)
	}
	return clip(string(b), cells)
}

// time formats a time; "" if it is zero.
func (a *app) time(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.In(a.loc).Format("2006-01-02 15:04:05")
}

// age formats the time since t; "" if it is zero.
func (a *app) age(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return short(a.now().Sub(t))
}

// short formats a duration by its two largest units.
func short(d time.Duration) string {
	sign := ""
	if d < 0 {
		sign, d = "-", -d
	}
	type unit struct {
		name string
		size time.Duration
	}
	units := []unit{{"d", 24 * time.Hour}, {"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}}
	for i, u := range units {
		if d < u.size {
			continue
		}
		text := fmt.Sprintf("%s%d%s", sign, d/u.size, u.name)
		if i+1 < len(units) {
			if rest := d % u.size / units[i+1].size; rest > 0 {
				text += fmt.Sprintf("%d%s", rest, units[i+1].name)
			}
		}
		return text
	}
	return fmt.Sprintf("%s%dms", sign, d.Milliseconds())
}

// sizeText formats a number of bytes.
func sizeText(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n), 0
	for f >= 1024 && i < 5 {
		f, i = f/1024, i+1
	}
	return fmt.Sprintf("%.1f %ciB", f, " KMGTP"[i])
}

// terminalOf returns v if it is a terminal, otherwise nil.
func terminalOf(v any) *os.File {
	if f, ok := v.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return f
	}
	return nil
}
