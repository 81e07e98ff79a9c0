package codeqweb

import (
	"cmp"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// worstShown is the number of queues in trouble above the numbers of all queues.
const worstShown = 4

// overviewRows is the number of queues on a page of the overview.
const overviewRows = 50

// defaultOrder is the sort order of the overview.
const defaultOrder = "worst"

// orders lists the sort orders of the overview, which are its columns.
var orders = []order{
	{"name", "Queue", func(a, b *row) int { return cmp.Compare(a.Name, b.Name) }},
	{"worst", "State", compareTrouble},
	{"ready", "Ready", func(a, b *row) int { return cmp.Compare(b.Counts.Ready, a.Counts.Ready) }},
	{"oldest", "Oldest", func(a, b *row) int { return compareOldest(a.Oldest, b.Oldest) }},
	{"scheduled", "Scheduled", func(a, b *row) int { return cmp.Compare(b.Counts.Scheduled, a.Counts.Scheduled) }},
	{"blocked", "Blocked", func(a, b *row) int { return cmp.Compare(b.Counts.Blocked, a.Counts.Blocked) }},
	{"leased", "Leased", func(a, b *row) int { return cmp.Compare(b.Counts.Leased, a.Counts.Leased) }},
	{"dead", "Dead", func(a, b *row) int { return cmp.Compare(b.Counts.Dead, a.Counts.Dead) }},
	{"completed", "Completed/s", func(a, b *row) int { return cmp.Compare(b.Completed, a.Completed) }},
	{"failed", "Failed/s", func(a, b *row) int { return cmp.Compare(b.Failed, a.Failed) }},
}

// order is a sort order of the overview.
type order struct {
	Name, Title string
	less        func(a, b *row) int
}

// sort is the direction, for a reader of the column.
func (o *order) sort() string {
	if o.Name == "name" {
		return "ascending"
	}
	return "descending"
}

func compareOldest(a, b time.Time) int {
	switch {
	case a.Equal(b):
		return 0
	case a.IsZero():
		return 1
	case b.IsZero():
		return -1
	default:
		return a.Compare(b)
	}
}

// overviewQuery returns the parameters of the overview in canonical form.
func overviewQuery(p url.Values) url.Values {
	q := url.Values{"span": {spanOf(p).Name}, "order": {defaultOrder}}
	for _, o := range orders {
		if o.Name == p.Get("order") {
			q.Set("order", o.Name)
		}
	}
	if n, err := strconv.Atoi(p.Get("from")); err == nil && n > 0 && n <= maxRows {
		q.Set("from", strconv.Itoa(n))
	}
	if find := p.Get("find"); find != "" {
		q.Set("find", clip(find, 255))
	}
	return q
}

// overviewView is the content of the overview.
type overviewView struct {
	At     time.Time
	Error  string
	All    row
	Queues int
	Charts *chartsView // nil in a stream
	Span   string

	Orders             []orderLink
	Rows               []overviewRow
	Troubled           int    // queues in trouble
	Worst              []*row // the first of them
	Find, Order        string
	From, Found        int    // index of the first row, and the number of matching queues
	Previous, Next     string // links; "": none
	Workers, Busy, Max int
	Quiet              int
	Unreachable        int // nodes that did not report their workers
	Disk, Dead         int64
	KnowsDisk          bool
	Free, MinFree      int64 // as in codeq.StorageStats
	LowDisk            bool  // less is free than twice MinFree
}

// overviewRow is a queue of the overview.
type overviewRow struct {
	*row
	Spark *spark // nil: the queue has no series
}

// orderLink is a column of the overview.
type orderLink struct {
	Title, URL, Sort string
	On, Number       bool
}

// overview returns the view of a sample.
func (d *Dashboard) overview(s *sample, p url.Values) overviewView {
	q := overviewQuery(p)
	v := overviewView{
		At: s.At, All: s.All, Queues: s.Queues, Span: q.Get("span"),
		Find: q.Get("find"), Order: q.Get("order"),
		Free: -1,
	}
	if s.Err != nil {
		v.Error = s.Err.Error()
	}
	at := func(name, value string) string {
		other := maps.Clone(q)
		other.Set(name, value)
		if name != "from" {
			other.Del("from")
		}
		return "./?" + other.Encode()
	}
	rows := make([]*row, 0, len(s.Rows))
	for i := range s.Rows {
		if s.Rows[i].Trouble.worst > 0 {
			v.Troubled++
			v.Worst = append(v.Worst, &s.Rows[i])
		}
		if v.Find == "" || strings.Contains(strings.ToLower(s.Rows[i].Name), strings.ToLower(v.Find)) {
			rows = append(rows, &s.Rows[i])
		}
	}
	slices.SortStableFunc(v.Worst, compareTrouble)
	v.Worst = v.Worst[:min(len(v.Worst), worstShown)]
	for _, o := range orders {
		v.Orders = append(v.Orders, orderLink{o.Title, at("order", o.Name), o.sort(), o.Name == v.Order, o.Name != "name" && o.Name != "worst"})
		if o.Name == v.Order && o.Name != "name" { // the rows are already sorted by name
			slices.SortStableFunc(rows, o.less)
		}
	}
	v.From, _ = strconv.Atoi(q.Get("from"))
	v.Found = len(rows)
	if v.From >= v.Found {
		v.From = 0
	}
	shown := rows[v.From:min(v.Found, v.From+overviewRows)]
	names := make([]string, len(shown))
	for i, r := range shown {
		names[i] = r.Name
	}
	backlogs := d.sampler.backlogs(names)
	for _, r := range shown {
		v.Rows = append(v.Rows, overviewRow{r, sparkOf(backlogs[r.Name])})
	}
	if v.From > 0 {
		v.Previous = at("from", strconv.Itoa(max(0, v.From-overviewRows)))
	}
	if v.From+overviewRows < v.Found {
		v.Next = at("from", strconv.Itoa(v.From+overviewRows))
	}
	for _, w := range s.Workers {
		if w.LastError != "" {
			v.Unreachable++
			continue
		}
		v.Workers, v.Busy, v.Max = v.Workers+1, v.Busy+w.Busy, v.Max+w.Concurrency
		if w.Quiet {
			v.Quiet++
		}
	}
	if st := s.Storage; st != nil {
		v.KnowsDisk, v.Free, v.MinFree = true, st.FreeBytes, st.MinFreeBytes
		v.LowDisk = v.Free >= 0 && v.Free/2 < v.MinFree
		for i := range st.Shards {
			v.Disk, v.Dead = v.Disk+st.Shards[i].DiskBytes, v.Dead+st.Shards[i].DeadBytes
		}
	}
	return v
}

// overviewPage shows all queues.
func (d *Dashboard) overviewPage(w http.ResponseWriter, r *request) error {
	s, err := d.sampler.fresh(r.Context(), time.Second)
	if s == nil {
		return err
	}
	q := overviewQuery(r.params)
	v := d.overview(s, q)
	if v.Charts, err = d.chartsView(r.Context(), "", spanOf(q), "./", q); err != nil {
		return err
	}
	q.Set("page", "overview")
	return d.show(w, r, page{Title: "Overview", Screen: "overview", Live: q.Encode(), Loads: chartFiles, Body: v})
}
