package codeqweb

import (
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"codeq"
)

// tasksRows is the default number of tasks on a page.
const tasksRows = 50

// states lists the states in the order of the tabs.
var states = []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Blocked, codeq.Leased, codeq.Dead, codeq.Done, codeq.Canceled}

// filterOf reads a filter of tasks from parameters. An empty field means any tenant; no-tenant=true
// means tasks without one. A text in contents needs the right to see them.
func (d *Dashboard) filterOf(r *request) (f codeq.TaskFilter, err error) {
	p := r.params
	f.Text, f.Contents = p.Get("text"), p.Get("contents") == "true" && p.Get("text") != ""
	if f.Contents && !r.access.Has(Payloads) {
		return f, errDenied
	}
	for _, text := range p["state"] {
		if text == "" {
			continue
		}
		var s codeq.State
		if err := s.UnmarshalText([]byte(text)); err != nil {
			return f, err
		}
		f.States = append(f.States, s)
	}
	f.Queue, f.Kind, f.Group, f.Key, f.ErrorKind = p.Get("queue"), p.Get("kind"), p.Get("group"), p.Get("key"), p.Get("error")
	for _, tenant := range p["tenant"] {
		if tenant != "" {
			f.Tenants = append(f.Tenants, tenant)
		}
	}
	if p.Get("no-tenant") == "true" {
		f.Tenants = append(f.Tenants, "")
	}
	if f.From, err = timeParam(p, "from"); err != nil {
		return f, err
	}
	f.To, err = timeParam(p, "to")
	return f, err
}

// filterQuery is the reverse of filterOf.
func filterQuery(f codeq.TaskFilter) url.Values {
	p := make(url.Values)
	for _, s := range f.States {
		p.Add("state", s.String())
	}
	for _, v := range []namedValue{{"queue", f.Queue}, {"kind", f.Kind}, {"group", f.Group}, {"key", f.Key}, {"error", f.ErrorKind}, {"text", f.Text}} {
		if v.Value != "" {
			p.Set(v.Name, v.Value.(string))
		}
	}
	for _, tenant := range f.Tenants {
		if tenant == "" {
			p.Set("no-tenant", "true")
		} else {
			p.Add("tenant", tenant)
		}
	}
	if f.Contents {
		p.Set("contents", "true")
	}
	for name, at := range map[string]time.Time{"from": f.From, "to": f.To} {
		if !at.IsZero() {
			p.Set(name, machine(at))
		}
	}
	return p
}

// shown returns a task without the parts that a request may not see.
func (d *Dashboard) shown(r *request, t *codeq.TaskInfo) *codeq.TaskInfo {
	return r.hide(d.redacted(t))
}

// redacted returns a task as Options.Redact leaves it.
func (d *Dashboard) redacted(t *codeq.TaskInfo) *codeq.TaskInfo {
	c := *t
	d.redact(&c)
	return &c
}

// hide removes from a task what needs a right that the request lacks.
func (r *request) hide(t *codeq.TaskInfo) *codeq.TaskInfo {
	if !r.access.Has(Payloads) {
		t.Payload, t.Result, t.Headers, t.Metadata, t.Steps, t.Cursors, t.Logs, t.Progress.Note = nil, nil, nil, nil, nil, nil, nil, ""
	}
	return t
}

// tab is a state, or all states, with the number of tasks in the last sample.
type tab struct {
	Name, URL string
	Count     uint64
	On        bool
}

// tasksView is the content of the page of tasks.
type tasksView struct {
	Tabs     []tab
	State    string // "": all
	Filter   codeq.TaskFilter
	Query    url.Values // the filter, for forms
	Tenant   string
	NoTenant bool
	From, To string
	Newest   bool
	Tasks    []*codeq.TaskInfo
	Scanned  int
	Encoded  int      // of these, tasks with contents that were not searched
	Contents bool     // the viewer may search them
	Next     string   // link; ""
	First    string   // link to the first page; "": this is it
	Actions  []string // in bulk
	Filtered bool
	Counted  bool   // the numbers of the tabs are those of the filter
	CSV      string // links to files of the list
	JSON     string
}

// bulkActions returns the bulk actions on tasks in a state.
func bulkActions(s codeq.State) []string {
	switch s {
	case codeq.Ready, codeq.Scheduled:
		return []string{"cancel", "set-priority", "move"}
	case codeq.Blocked:
		return []string{"cancel", "set-priority"}
	case codeq.Leased:
		return []string{"cancel"}
	case codeq.Dead:
		return []string{"redrive", "purge", "move", "cancel"}
	case codeq.Done, codeq.Canceled:
		return []string{"purge"}
	}
	return nil
}

// tasksPage lists tasks.
func (d *Dashboard) tasksPage(w http.ResponseWriter, r *request) error {
	p := r.params
	if text := strings.TrimSpace(p.Get("id")); text != "" { // from the head of a page
		if id, err := codeq.ParseID(text); err == nil {
			w.Header().Set("Location", "./"+link("task", "id", id))
			w.WriteHeader(http.StatusSeeOther)
			return nil
		}
		return invalid("id", "the ID of a task")
	}
	filter, err := d.filterOf(r)
	if err != nil {
		return err
	}
	v := tasksView{Contents: r.access.Has(Payloads), Filter: filter, Newest: p.Get("newest") == "true", Query: filterQuery(filter)}
	tasks, err := d.list(r, codeq.PageOptions{TaskFilter: filter, Newest: v.Newest, NoPayload: true, Limit: tasksRows, Cursor: p.Get("cursor")})
	if err != nil {
		return err
	}
	v.Tasks, v.Scanned, v.Encoded = tasks.Tasks, tasks.Scanned, tasks.Encoded
	query := filterQuery(filter)
	if v.Newest {
		query.Set("newest", "true")
	}
	if tasks.Next != "" {
		query.Set("cursor", tasks.Next)
		v.Next = "tasks?" + query.Encode()
		query.Del("cursor")
	}
	if p.Get("cursor") != "" {
		v.First = "tasks?" + query.Encode()
	}
	v.Tabs = d.tabs(r, query, filter)
	v.CSV, v.JSON = saveLinks(query)
	if len(filter.States) == 1 {
		v.State, v.Actions = filter.States[0].String(), bulkActions(filter.States[0])
	}
	if len(filter.Tenants) > 0 {
		v.Tenant, v.NoTenant = filter.Tenants[0], slices.Contains(filter.Tenants, "")
	}
	v.From, v.To = fieldTime(filter.From), fieldTime(filter.To)
	v.Counted = len(v.Query) == len(filterQuery(codeq.TaskFilter{States: filter.States, Queue: filter.Queue}))
	v.Filtered = len(v.Query) > len(v.Query["state"]) || v.Query.Get("queue") != ""
	refresh := 3
	if p.Get("cursor") != "" {
		refresh = 0 // do not reload a page that is being read
	}
	title := "Tasks"
	if filter.Queue != "" {
		title += " of " + filter.Queue
	}
	return d.show(w, r, page{Title: title, Screen: "tasks", Refresh: refresh, Body: v})
}

// tabs returns the tabs with their numbers of tasks.
func (d *Dashboard) tabs(r *request, query url.Values, filter codeq.TaskFilter) []tab {
	var counts codeq.Counts
	if s, _ := d.sampler.fresh(r.Context(), time.Second); s != nil {
		counts = s.counts(filter.Queue)
	}
	other := maps.Clone(query)
	other.Del("state")
	tabs := []tab{{"all", "tasks?" + other.Encode(), counts.Total(), len(filter.States) == 0}}
	// Of those that have ended, the newest come first; the viewer chooses it for the others.
	ended := []codeq.State{codeq.Dead, codeq.Done, codeq.Canceled}
	chosen := query.Has("newest") && !(len(filter.States) == 1 && slices.Contains(ended, filter.States[0]))
	for i, s := range states {
		other.Set("state", s.String())
		other.Del("newest")
		if chosen || slices.Contains(ended, s) {
			other.Set("newest", "true")
		}
		n := [...]uint64{counts.Ready, counts.Scheduled, counts.Blocked, counts.Leased, counts.Dead, counts.Done, counts.Canceled}[i]
		tabs = append(tabs, tab{s.String(), "tasks?" + other.Encode(), n, len(filter.States) == 1 && filter.States[0] == s})
	}
	return tabs
}
