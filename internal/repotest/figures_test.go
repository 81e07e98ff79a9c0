package repotest

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var updateReadme = flag.Bool("readme.update", false, "TestReadmeFigures copies what README.md quotes from bench/results")

// quotation is a part of a section that a program below bench wrote: its tables, or some rows of
// the first one, counted from 1; of the section Machine, the head of the file, its date, commit and
// machine.
var quotation = regexp.MustCompile(
	`(?s)(<!-- from (bench/results/\S+), ([^\n,]+)(?:, rows ([\d ]+))? -->\n).*?(<!-- end -->\n)`)

// quoting are the documents with quotations, and their sections about measurements.
var quoting = map[string][]string{
	"README.md":               {"Figures"},
	"docs/operations.md":      {"Backup"},
	"docs/replication.md":     {"When", "What it costs", "What fails", "Operation"},
	"bench/results/README.md": {"Beside other queues", "What features cost", "What bounds it", "Over time"},
}

// TestReadmeFigures: each quotation equals its source. In the rest of the sections about
// measurements no table has numbers, and all numbers of the prose, except in code, occur in files
// that programs wrote. That proves little for small numbers, and nothing about the words.
func TestReadmeFigures(t *testing.T) {
	inRoot(t)
	for file, sections := range quoting {
		t.Run(file, func(t *testing.T) { testFigures(t, file, sections) })
	}
}

func testFigures(t *testing.T, file string, sections []string) {
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	document := string(b)
	quoted := quotation.ReplaceAllStringFunc(document, func(q string) string {
		m := quotation.FindStringSubmatch(q)
		return m[1] + "\n" + quote(t, m[2], m[3], strings.Fields(m[4])) + "\n" + m[5]
	})
	if *updateReadme {
		require.NoError(t, os.WriteFile(file, []byte(quoted), 0o644))
		document = quoted
	}
	require.Equal(t, quoted, document, "go test -run ReadmeFigures ./internal/repotest -readme.update")

	number := regexp.MustCompile(`\d+([.,]\d+)*`)
	measured := make(map[string]bool)
	for _, file := range written(t) {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, n := range number.FindAllString(string(text), -1) {
			measured[n] = true
		}
	}
	code := regexp.MustCompile("(?s)```.*?```|`.*?`|\\]\\(.*?\\)")
	var checked []string
	for section := range strings.SplitSeq(quotation.ReplaceAllString(document, ""), "\n## ") {
		title, text, _ := strings.Cut(section, "\n")
		if !slices.Contains(sections, title) {
			continue
		}
		checked = append(checked, title)
		for line := range strings.Lines(code.ReplaceAllString(text, "")) {
			for _, n := range number.FindAllString(line, -1) {
				require.False(t, strings.HasPrefix(line, "|"), "%s: a table that is no quotation: %s", title, line)
				require.True(t, measured[n], "%s: no program has written %s: %s", title, n, line)
			}
		}
	}
	require.Equal(t, sections, checked)
}

// written are the documents in bench/results but the one that a person writes.
func written(t *testing.T) []string {
	files, err := filepath.Glob("bench/results/*.md")
	require.NoError(t, err)
	return slices.DeleteFunc(files, func(file string) bool { return filepath.Base(file) == "README.md" })
}

// quote returns the tables of a section of a file, or of its head, or the rows of the first table.
func quote(t *testing.T, file, title string, rows []string) string {
	require.Contains(t, written(t), file)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	section, begin := "", []string{"|"}
	if title == "Machine" {
		section, _, _ = strings.Cut(string(b), "\n## ")
		begin = []string{"Written at ", "The disk did "}
	} else {
		_, rest, ok := strings.Cut(string(b), "\n## "+title+"\n")
		require.True(t, ok, "%s has no section %s", file, title)
		section, _, _ = strings.Cut(rest, "\n## ")
	}
	var parts []string
	for part := range strings.SplitSeq(section, "\n\n") {
		part = strings.Trim(part, "\n")
		if slices.ContainsFunc(begin, func(s string) bool { return strings.HasPrefix(part, s) }) {
			parts = append(parts, part+"\n")
		}
	}
	require.NotEmpty(t, parts, "%s, %s", file, title)
	if len(rows) > 0 {
		lines := strings.SplitAfter(parts[0], "\n")
		chosen := lines[:2] // the head
		for _, row := range rows {
			n, err := strconv.Atoi(row)
			require.NoError(t, err)
			require.Less(t, n+1, len(lines)-1, "%s, %s has no row %d", file, title, n)
			chosen = append(chosen[:len(chosen):len(chosen)], lines[n+1])
		}
		return strings.Join(chosen, "")
	}
	return strings.Join(parts, "\n")
}
