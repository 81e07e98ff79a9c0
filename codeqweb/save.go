package codeqweb

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"codeq"
)

// A list can be saved as it is selected: more of it than a page shows, within these bounds, which
// doc.go and the template "save" tell.
const (
	savedMost  = 20_000 // tasks
	savedBytes = 8 << 20
	savedTime  = 10 * time.Second
)

// savedColumns are the columns of a list in CSV.
var savedColumns = []struct {
	name string
	of   func(*codeq.TaskInfo) string
}{
	{"ID", func(t *codeq.TaskInfo) string { return t.ID.String() }},
	{"Queue", func(t *codeq.TaskInfo) string { return t.Queue }},
	{"Kind", func(t *codeq.TaskInfo) string { return t.Kind }},
	{"State", func(t *codeq.TaskInfo) string { return t.State.String() }},
	{"At", func(t *codeq.TaskInfo) string { return machine(t.At) }},
	{"Tenant", func(t *codeq.TaskInfo) string { return t.Tenant }},
	{"Group", func(t *codeq.TaskInfo) string { return t.Group }},
	{"LimitKey", func(t *codeq.TaskInfo) string { return t.LimitKey }},
	{"Key", func(t *codeq.TaskInfo) string { return t.Unique.Key }},
	{"Priority", func(t *codeq.TaskInfo) string { return strconv.Itoa(t.Priority) }},
	{"Attempts", func(t *codeq.TaskInfo) string { return strconv.Itoa(t.Attempts) }},
	{"LastError", func(t *codeq.TaskInfo) string { return t.LastError }},
}

// cell returns a text that a spreadsheet does not take for a formula
// (https://owasp.org/www-community/attacks/CSV_Injection).
func cell(text string) string {
	text = visible(text)
	if first, _ := utf8.DecodeRuneInString(text); text != "" && strings.ContainsRune("=+-@\t\n＝＋－＠", first) {
		return "'" + text
	}
	return text
}

// saveLinks returns the links to the files of a list with a filter.
func saveLinks(filter url.Values) (asCSV, asJSON string) {
	p := maps.Clone(filter)
	p.Set("as", "csv")
	asCSV = "save?" + p.Encode()
	p.Set("as", "jsonl")
	return asCSV, "save?" + p.Encode()
}

// saver writes tasks in one form.
type saver interface{ write(*codeq.TaskInfo) error }

type csvSaver struct{ *csv.Writer }

func (s csvSaver) write(t *codeq.TaskInfo) error {
	row := make([]string, len(savedColumns))
	for i := range savedColumns {
		row[i] = cell(savedColumns[i].of(t))
	}
	err := s.Write(row)
	s.Flush() // the size of the answer counts
	return err
}

type jsonSaver struct{ *json.Encoder }

func (s jsonSaver) write(t *codeq.TaskInfo) error { return s.Encode(t) }

// newSaver returns the saver of a form, with the type and the end of the name of its file.
func newSaver(form string, w io.Writer) (s saver, kind, ext string, err error) {
	switch form {
	case "csv":
		out := csv.NewWriter(w)
		head := make([]string, len(savedColumns))
		for i := range savedColumns {
			head[i] = savedColumns[i].name
		}
		_ = out.Write(head)
		out.Flush()
		return csvSaver{out}, "text/csv; charset=utf-8", ".csv", out.Error()
	case "jsonl":
		return jsonSaver{json.NewEncoder(w)}, "application/jsonl", ".jsonl", nil
	}
	return nil, "", "", invalid("as", `"csv" or "jsonl"`)
}

// saveTasks is a file of the selected tasks, without payloads. If there are more, its name says so,
// and the header Link leads to the next ones. It may read as much as a search, and takes the place
// of one.
func (d *Dashboard) saveTasks(w http.ResponseWriter, r *request) error {
	filter, err := d.filterOf(r)
	if err != nil {
		return err
	}
	var file bytes.Buffer // an error in the middle is an answer of its own
	form := r.params.Get("as")
	out, kind, ext, err := newSaver(form, &file)
	if err != nil {
		return err
	}
	begin := r.params.Get("cursor")
	opts := codeq.PageOptions{
		TaskFilter: filter, Newest: r.params.Get("newest") == "true", NoPayload: true, Limit: codeq.MaxPage, Cursor: begin,
	}
	leave, err := d.enterSearch(r)
	if err != nil {
		return err
	}
	defer leave()
	saved := 0
	for begun := time.Now(); ; {
		opts.Limit = min(codeq.MaxPage, savedMost-saved)
		tasks, err := d.list(r, opts)
		if err != nil {
			return err
		}
		for _, t := range tasks.Tasks {
			if err := out.write(t); err != nil {
				return err
			}
			saved++
		}
		if opts.Cursor = tasks.Next; opts.Cursor == "" || saved >= savedMost || file.Len() >= savedBytes || time.Since(begun) > savedTime {
			break
		}
	}
	h := w.Header()
	if opts.Cursor != "" {
		next := filterQuery(filter)
		next.Set("as", form)
		next.Set("cursor", opts.Cursor)
		if opts.Newest {
			next.Set("newest", "true")
		}
		h.Set("Link", "<save?"+next.Encode()+`>; rel="next"`)
	}
	h.Set("Content-Type", kind)
	h.Set("Content-Disposition", `attachment; filename="`+savedName(saved, begin != "", opts.Cursor != "")+ext+`"`)
	_, _ = w.Write(file.Bytes())
	return nil
}

// savedName names a file of so many tasks, after others or before others.
func savedName(tasks int, after, before bool) string {
	switch {
	case after && before:
		return "the next " + strconv.Itoa(tasks) + " tasks"
	case after:
		return "the last " + strconv.Itoa(tasks) + " tasks"
	case before:
		return "the first " + strconv.Itoa(tasks) + " tasks"
	}
	return "tasks"
}
