package benchstat

import (
	"cmp"
	"context"
	"encoding/csv"
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"codeq/bench/report/internal/document"
)

// Comparison is a table of medians, as benchstat computes them, by benchstat's keys.
type Comparison struct {
	Filter string   // of benchmarks
	Units  []string // as in the benchmarks
	Row    string
	// Column may be empty: then the units are beside each other, otherwise below each other.
	Column string
	// Down puts the columns below and the units beside each other. REQUIRES: there is one row.
	Down bool
}

// cell is a median.
type cell struct {
	row, column, unit string // the unit is that of benchstat: B, where the benchmark has MB
	value             float64
	spread            string // the confidence interval; empty: too few runs
	change            string // from the first column; empty: not significant
}

// Medians has the cells of a comparison.
type Medians struct {
	Comparison
	cells []cell
}

// Of returns the median of a row of a comparison without columns; NaN if there is none.
func (m Medians) Of(row, unit string) float64 {
	for _, c := range m.cells {
		if c.row == row && c.unit == unit {
			return c.value
		}
	}
	return math.NaN()
}

// Table returns a table with its header. words replaces the names of rows, columns and units.
func (m Medians) Table(words map[string]string) (header []string, rows [][]any) {
	across := m.Column != "" && !m.Down
	header = []string{""}
	if across {
		header = append(header, "") // of the units
	}
	at := make(map[string]int) // rows, by their labels
	for _, cell := range m.cells {
		labels, head := []string{cell.row}, cell.unit
		switch {
		case across:
			labels, head = append(labels, cell.unit), cell.column
		case m.Down:
			labels[0] = cell.column
		}
		row, ok := at[strings.Join(labels, " ")]
		if !ok {
			row = len(rows)
			at[strings.Join(labels, " ")] = row
			line := []any{}
			for _, l := range labels {
				line = append(line, cmp.Or(words[l], l))
			}
			rows = append(rows, line)
		}
		head = cmp.Or(words[head], head)
		column := slices.Index(header, head)
		if column < 0 {
			column = len(header)
			header = append(header, head)
		}
		rows[row] = append(rows[row], make([]any, max(column+1-len(rows[row]), 0))...)
		rows[row][column] = cell.shown()
	}
	return header, rows
}

// shown returns the number alone, or text with its unit, spread and change.
func (c cell) shown() any {
	var text string
	switch {
	case strings.HasSuffix(c.unit, "B"):
		text = document.Bytes(int64(c.value))
	case c.spread == "" && c.change == "" && c.value < 1000 && c.value == math.Trunc(c.value):
		return int(c.value)
	case c.spread == "" && c.change == "":
		return c.value
	default:
		text = document.Number(c.value)
	}
	if c.spread != "" {
		text += " ± " + c.spread
	}
	if c.change != "" {
		text += " (" + c.change + ")"
	}
	return text
}

// Run compares the results in a file by benchstat.
func (c Comparison) Run(ctx context.Context, file string) (m Medians, err error) {
	root, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "codeq").Output()
	if err != nil {
		return m, fmt.Errorf("find the module of codeq: %w", err)
	}
	units := fmt.Sprintf(".unit:(%s)", strings.Join(quoted(c.Units), " OR "))
	cmd := exec.CommandContext(ctx, "go", "tool", "-modfile="+filepath.Join(strings.TrimSpace(string(root)), "tools", "go.mod"), "benchstat",
		"-format", "csv", "-table", "", "-row", c.Row, "-col", c.Column, "-filter", c.Filter+" "+units, file)
	var problems strings.Builder // and warnings of few runs
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil {
		return m, fmt.Errorf("benchstat: %w: %s", err, problems.String())
	}
	cells, err := parse(string(out))
	if err == nil && len(cells) == 0 { // benchstat always ends with status 0
		err = fmt.Errorf("benchstat found no results of %s %s in %s: %s", c.Filter, units, file, problems.String())
	}
	if err != nil {
		return m, err
	}
	order := strings.Split(strings.ReplaceAll(strings.Join(c.Units, " "), "MB", "B"), " ")
	slices.SortStableFunc(cells, func(a, b cell) int { return slices.Index(order, a.unit) - slices.Index(order, b.unit) })
	return Medians{c, cells}, nil
}

func quoted(words []string) (all []string) {
	for _, w := range words {
		all = append(all, strconv.Quote(w))
	}
	return all
}

// parse reads the output of benchstat: for each unit a table, with a line of columns if there are
// several, and a line with the kind of each field: the unit of a median, "CI", "vs base" or "P".
func parse(text string) (all []cell, err error) {
	r := csv.NewReader(strings.NewReader(text))
	r.FieldsPerRecord = -1
	records, err := r.ReadAll()
	if err != nil {
		return nil, err
	}
	var head [][]string
	for n, record := range records {
		if record[0] == "" {
			if n > 0 && records[n-1][0] != "" {
				head = nil
			}
			head = append(head, record)
			continue
		}
		if record[0] == "geomean" {
			continue
		}
		for i, text := range record[1:] {
			if text == "" {
				continue
			}
			switch field := head[len(head)-1][i+1]; field {
			case "CI":
				all[len(all)-1].spread = strings.TrimSuffix(text, "∞")
			case "vs base":
				if strings.HasSuffix(text, "%") {
					all[len(all)-1].change = text
				}
			case "P":
			default:
				c := cell{row: record[0], unit: field}
				if len(head) > 1 {
					c.column = head[0][i+1]
				}
				if c.value, err = strconv.ParseFloat(text, 64); err != nil {
					return nil, err
				}
				all = append(all, c)
			}
		}
	}
	return all, nil
}
