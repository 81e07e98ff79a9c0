// Package document writes Markdown with the machine, the commit and the command line of the
// results.
package document

import (
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/text/language"
	"golang.org/x/text/message"
)

// Document is a Markdown file before it is written.
type Document struct{ text strings.Builder }

// New begins a document with a title, and with the facts for judging and repeating it: time,
// machine, command line, and commit of the repository around the working directory.
func New(title string, m Machine) *Document {
	d := &Document{}
	fmt.Fprintf(&d.text, "# %s\n", title)
	d.Paragraph("`%s`", Command())
	d.Paragraph("Written at %s of commit %s. Machine: %s.", time.Now().UTC().Format("2006-01-02 15:04 MST"), Commit("."), m)
	return d
}

// Heading begins a section.
func (d *Document) Heading(text string) { fmt.Fprintf(&d.text, "\n## %s\n", text) }

// Paragraph adds text, formatted as by fmt.Sprintf.
func (d *Document) Paragraph(format string, args ...any) {
	fmt.Fprintf(&d.text, "\n"+format+"\n", args...)
}

// List adds a list.
func (d *Document) List(items ...string) {
	d.text.WriteByte('\n')
	for _, item := range items {
		fmt.Fprintf(&d.text, "- %s\n", item)
	}
}

// Table adds a table. Integers are written in full with separators of thousands, other numbers and
// durations with three significant digits, the rest as by fmt.Sprint; NaN is a dash. Columns with
// numbers are aligned to the right. Rows may be shorter than the header.
func (d *Document) Table(header []string, rows ...[]any) {
	right := make([]bool, len(header))
	cells := make([][]string, len(rows))
	for i, row := range rows {
		cells[i] = make([]string, len(header))
		for j, v := range row {
			var number bool
			cells[i][j], number = cell(v)
			right[j] = right[j] || number
		}
	}
	rule := make([]string, len(header))
	for j := range rule {
		rule[j] = "---"
		if right[j] {
			rule[j] = "---:"
		}
	}
	d.text.WriteByte('\n')
	for _, row := range append([][]string{header, rule}, cells...) {
		for j := range row {
			row[j] = strings.ReplaceAll(row[j], "|", `\|`)
		}
		fmt.Fprintf(&d.text, "| %s |\n", strings.Join(row, " | "))
	}
}

// Image shows a file by its path relative to the document.
func (d *Document) Image(caption, file string) {
	fmt.Fprintf(&d.text, "\n![%s](%s)\n", caption, filepath.ToSlash(file))
}

// Write writes the document to a file.
func (d *Document) Write(file string) error {
	return os.WriteFile(file, []byte(d.text.String()), 0o644)
}

// cell returns a value as text, and reports whether it is a number.
func cell(v any) (text string, number bool) {
	switch v := v.(type) {
	case nil:
		return "", false
	case time.Duration:
		return Duration(v), true
	case float64:
		return Number(v), true
	case int, int64, uint64:
		return english.Sprint(v), true
	}
	return fmt.Sprint(v), false
}

// english puts separators of thousands into numbers.
var english = message.NewPrinter(language.English)

// Number formats x with three significant digits, and separators of thousands: 123,000; 12.3;
// 0.0123. NaN is a dash.
func Number(x float64) string {
	if math.IsNaN(x) {
		return "-"
	}
	if x == 0 || math.IsInf(x, 0) {
		return fmt.Sprint(x)
	}
	x, _ = strconv.ParseFloat(strconv.FormatFloat(x, 'e', 2, 64), 64)
	decimals := max(2-int(math.Floor(math.Log10(math.Abs(x)))), 0)
	return english.Sprintf("%.*f", decimals, x)
}

// Duration formats d with three significant digits in a suitable unit: 1.23 ms.
func Duration(d time.Duration) string {
	unit, name := time.Second, "s"
	switch abs := d.Abs(); {
	case abs == 0:
		return "0 s"
	case abs >= 10*time.Minute:
		return d.Round(time.Second).String()
	case abs < time.Microsecond:
		unit, name = time.Nanosecond, "ns"
	case abs < time.Millisecond:
		unit, name = time.Microsecond, "us"
	case abs < time.Second:
		unit, name = time.Millisecond, "ms"
	}
	return Number(float64(d)/float64(unit)) + " " + name
}

// Bytes formats n with three significant digits and a unit of powers of ten: 12.3 MB.
func Bytes(n int64) string {
	x, units := float64(n), []string{"B", "kB", "MB", "GB", "TB"}
	for math.Abs(x) >= 999.5 && len(units) > 1 {
		x, units = x/1000, units[1:]
	}
	return Number(x) + " " + units[0]
}

// Command returns the command line of this program, for a shell in the root of the repository.
func Command() string { return "go run -C bench/report ." + Words(os.Args[1:]) }

// Words quotes arguments for a shell, each after a space.
func Words(args []string) string {
	var line strings.Builder
	for _, arg := range args {
		line.WriteString(" " + quoted(arg))
	}
	return line.String()
}

// quoted returns a word for the shell.
func quoted(arg string) string {
	if arg != "" && strings.Trim(arg, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+,.:/@%") == "" {
		return arg
	}
	return "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
}

// Commit describes the commit in the repository of dir, with "+changes" if files outside
// bench/results differ from it. It is "unknown" where git fails.
func Commit(dir string) string {
	commit, err := exec.Command("git", "-C", dir, "describe", "--always", "--tags").Output()
	if err != nil {
		return "unknown"
	}
	changes, err := exec.Command("git", "-C", dir, "status", "--porcelain", "--", ":(top)", ":(top,exclude)bench/results").Output()
	if err != nil || len(changes) > 0 {
		return strings.TrimSpace(string(commit)) + "+changes"
	}
	return strings.TrimSpace(string(commit))
}
