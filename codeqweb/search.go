package codeqweb

import (
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"codeq"
)

// The bounds of a search: it reads tasks for some time, and the page has a link to go on.
const (
	searchTime     = 2 * time.Second
	searchRows     = 25
	searchNames    = 10 // queues and schedules each
	maxSearches    = 2  // at a time
	searchesOfUser = 1
)

// searchOrder lists the states that a search reads, the urgent ones first.
var searchOrder = []codeq.State{codeq.Dead, codeq.Leased, codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Done, codeq.Canceled}

// searchView is the content of the page of a search.
type searchView struct {
	Text      string
	Queue     string // "": in all queues
	Contents  bool   // payloads, results, headers and metadata are searched, too
	Queues    []string
	Schedules []string
	Tasks     []*codeq.TaskInfo
	Scanned   int // tasks, those of earlier pages included; some are read for two pages
	Encoded   int // of these, those with a payload or a result that is no text
	Total     int
	Next      string // link to go on; "": all were looked through
	Later     bool   // this is not the first page
	CSV, JSON string // links to files of the results
}

// searchPage looks for a text.
func (d *Dashboard) searchPage(w http.ResponseWriter, r *request) error {
	p := r.params
	v := searchView{Text: strings.TrimSpace(p.Get("q")), Queue: p.Get("queue"), Contents: r.access.Has(Payloads)}
	title := "Search"
	if v.Text != "" {
		title += " for " + v.Text
		if id, err := codeq.ParseID(v.Text); err == nil {
			w.Header().Set("Location", "./"+link("task", "id", id))
			w.WriteHeader(http.StatusSeeOther)
			return nil
		}
		if err := d.search(r, &v); err != nil {
			return err
		}
	}
	return d.show(w, r, page{Title: title, Screen: "search", Body: v})
}

// search adds the results.
func (d *Dashboard) search(r *request, v *searchView) error {
	p, ctx := r.params, r.Context()
	leave, err := d.enterSearch(r)
	if err != nil {
		return err
	}
	defer leave()
	for name, n := range map[string]*int{"scanned": &v.Scanned, "encoded": &v.Encoded} {
		if p.Get(name) != "" {
			if *n, err = intParam(p, name); err != nil {
				return err
			}
		}
	}
	stats, err := d.q.Stats(ctx)
	if err != nil {
		return err
	}
	cursor := p.Get("cursor")
	if v.Later = cursor != ""; !v.Later {
		d.findNames(ctx, stats, v)
	}
	for queue, counts := range stats {
		if v.Queue == "" || queue == v.Queue {
			v.Total += int(counts.Total())
		}
	}
	filter := codeq.TaskFilter{States: searchOrder, Queue: v.Queue, Text: v.Text, Contents: v.Contents}
	for begun := time.Now(); ; {
		found, err := d.list(r, codeq.PageOptions{TaskFilter: filter, NoPayload: true, Limit: searchRows - len(v.Tasks), Cursor: cursor})
		if err != nil {
			return err
		}
		v.Scanned, v.Encoded, cursor = v.Scanned+found.Scanned, v.Encoded+found.Encoded, found.Next
		v.Tasks = append(v.Tasks, found.Tasks...)
		if cursor == "" || len(v.Tasks) == searchRows || time.Since(begun) > searchTime {
			break
		}
	}
	v.CSV, v.JSON = saveLinks(filterQuery(filter))
	if v.Scanned = min(v.Scanned, v.Total); cursor != "" {
		v.Next = link("search", "q", v.Text, "queue", v.Queue, "cursor", cursor, "scanned", v.Scanned, "encoded", v.Encoded)
	}
	return nil
}

// errSearches is the refusal of a search, or saved list, beside another one of its user.
var errSearches = &refusal{http.StatusTooManyRequests, "busy", "one search or saved list of a user runs at a time, and another one still runs"}

// enterSearch waits for a place of a search, until leave is called.
func (d *Dashboard) enterSearch(r *request) (leave func(), err error) {
	leaveUser, err := d.users.enter(&d.users.searches, r.user, searchesOfUser)
	if err != nil {
		return nil, errSearches
	}
	if err := enter(r.Context(), d.searches); err != nil {
		leaveUser()
		return nil, err
	}
	return func() {
		<-d.searches
		leaveUser()
	}, nil
}

// findNames finds the queues and the schedules with the text in their names.
func (d *Dashboard) findNames(ctx context.Context, stats map[string]codeq.Counts, v *searchView) {
	part := strings.ToLower(v.Text)
	has := func(name string) bool { return strings.Contains(strings.ToLower(name), part) }
	for _, name := range slices.Sorted(maps.Keys(stats)) {
		if len(v.Queues) < searchNames && has(name) {
			v.Queues = append(v.Queues, name)
		}
	}
	schedules, _ := d.q.Schedules(ctx) // an error is that of the tasks as well
	for i := range schedules {
		if len(v.Schedules) < searchNames && has(schedules[i].Name) {
			v.Schedules = append(v.Schedules, schedules[i].Name)
		}
	}
}

// Percent returns how much of a search is done, 0 to 100.
func (v searchView) Percent() int {
	return 100 * v.Scanned / max(v.Total, 1)
}
