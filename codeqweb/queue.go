package codeqweb

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"codeq"
)

// tenantsRead bounds the ready tasks read to count tenants.
const tenantsRead = 1000

// queueLive is the part of a queue's page that the stream updates.
type queueLive struct {
	At     time.Time
	Error  string
	Known  bool
	Row    row
	By     string
	Charts []chart
}

// queueView is the content of the page of a queue.
type queueView struct {
	Live     queueLive
	Name     string
	Settings codeq.Settings
	Form     map[string]string // the fields of the form, by their names
	Odd      bool              // a form cannot send the names of the tenants unchanged
	Totals   codeq.Totals
	Bars     []bar
	Days     int
	Top      string // the value at the top of the days
	Waiting  waitingTenants
}

// waitingTenants has the tenants of a queue with ready tasks or a weight.
type waitingTenants struct {
	Tenants []waitingTenant // by ready tasks, descending
	Read    int             // number of ready tasks read
	All     bool            // all ready tasks were read
}

type waitingTenant struct {
	Name   string
	Ready  int // among the tasks read
	Weight int
}

// queueLive returns the part of the page that the stream updates.
func (d *Dashboard) queueLive(s *sample, name string, p url.Values) queueLive {
	v := queueLive{At: s.At, By: by(p), Row: row{Name: name}}
	if s.Err != nil {
		v.Error = s.Err.Error()
	}
	if r := s.row(name); r != nil {
		v.Row, v.Known = *r, true
	}
	v.Charts = d.charts(name, v.By == "minute")
	return v
}

// queuePage shows a queue and the form of its settings.
func (d *Dashboard) queuePage(w http.ResponseWriter, r *request) error {
	name, ctx := r.params.Get("name"), r.Context()
	if name == "" {
		return invalid("name", "the name of a queue")
	}
	s, err := d.sampler.fresh(ctx, time.Second)
	if s == nil {
		return err
	}
	v := queueView{Live: d.queueLive(s, name, r.params), Name: name, Days: codeq.TotalsDays}
	if v.Settings, err = d.q.Settings(name); err != nil {
		return err
	}
	v.Form = make(map[string]string)
	for _, f := range settingFields {
		v.Form[f.name] = f.text(&v.Settings)
	}
	for tenant := range v.Settings.TenantWeights {
		v.Odd = v.Odd || visible(tenant) != tenant || strings.Contains(tenant, "\n")
	}
	days, err := d.q.TotalsByDay(ctx, name)
	if err != nil {
		return err
	}
	drawn := make([]dayTotals, 0, len(days))
	for _, day := range days {
		t := totalsOf(&day.Totals)
		drawn = append(drawn, dayTotals{day.Day, t.completed, t.failed})
		v.Totals.Produced, v.Totals.Completed = v.Totals.Produced+day.Produced, v.Totals.Completed+day.Completed
		v.Totals.Retried, v.Totals.Expired = v.Totals.Retried+day.Retried, v.Totals.Expired+day.Expired
		v.Totals.Released, v.Totals.Dead = v.Totals.Released+day.Released, v.Totals.Dead+day.Dead
		v.Totals.Canceled, v.Totals.Claimed = v.Totals.Canceled+day.Canceled, v.Totals.Claimed+day.Claimed
	}
	bars, top := drawDays(drawn, codeq.TotalsDays, time.Now().UTC().Truncate(24*time.Hour))
	v.Bars, v.Top = bars, number(top)
	if v.Waiting, err = d.tenants(ctx, name, v.Settings.TenantWeights); err != nil {
		return err
	}
	live := url.Values{"page": {"queue"}, "name": {name}, "by": {v.Live.By}}
	return d.show(w, r, page{Title: "Queue " + name, Screen: "queue", Live: live.Encode(), Body: v})
}

// tenants counts the ready tasks of a queue by tenant.
func (d *Dashboard) tenants(ctx context.Context, queue string, weights map[string]int) (t waitingTenants, err error) {
	ready, err := d.q.ListPage(ctx, codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}, Queue: queue}, NoPayload: true, Limit: tenantsRead,
	})
	if err != nil {
		return t, err
	}
	counts := make(map[string]int)
	for _, task := range ready.Tasks {
		counts[task.Tenant]++
	}
	for name := range weights {
		counts[name] += 0
	}
	t = waitingTenants{Tenants: []waitingTenant{}, Read: len(ready.Tasks), All: ready.Next == ""}
	for name, n := range counts {
		t.Tenants = append(t.Tenants, waitingTenant{name, n, cmp.Or(weights[name], 1)})
	}
	slices.SortFunc(t.Tenants, func(a, b waitingTenant) int {
		return cmp.Or(cmp.Compare(b.Ready, a.Ready), cmp.Compare(a.Name, b.Name))
	})
	return t, nil
}

// settingField is a field of the form of settings: text formats the setting, set changes it.
type settingField struct {
	name string
	text func(*codeq.Settings) string
	set  func(s *codeq.Settings, p url.Values, name string) error
}

// settingFields lists the fields. The form has the original text of each as "was-" and the name, so
// that edited fields are known.
var settingFields = []settingField{
	intField("concurrency", func(s *codeq.Settings) *int { return &s.Concurrency }),
	intField("concurrency-per-key", func(s *codeq.Settings) *int { return &s.ConcurrencyPerKey }),
	{"rate", func(s *codeq.Settings) string { return strconv.FormatFloat(s.Rate, 'g', -1, 64) }, setRate},
	intField("burst", func(s *codeq.Settings) *int { return &s.Burst }),
	durationField("retention", func(s *codeq.Settings) *time.Duration { return &s.Retention }),
	durationField("dead-retention", func(s *codeq.Settings) *time.Duration { return &s.DeadRetention }),
	{holdGroups, func(s *codeq.Settings) string { return strconv.FormatBool(s.HoldGroups) }, func(s *codeq.Settings, p url.Values, name string) error {
		s.HoldGroups = p.Get(name) == "true"
		return nil
	}},
	{"tenant-weights", weightsText, setWeights},
}

// holdGroups is the name of a checkbox: a browser does not send one that is not checked.
const holdGroups = "hold-groups"

func intField(name string, of func(*codeq.Settings) *int) settingField {
	return settingField{name, func(s *codeq.Settings) string { return strconv.Itoa(*of(s)) }, func(s *codeq.Settings, p url.Values, name string) (err error) {
		if *of(s) = 0; p.Get(name) != "" {
			*of(s), err = intParam(p, name)
		}
		return err
	}}
}

func durationField(name string, of func(*codeq.Settings) *time.Duration) settingField {
	text := func(s *codeq.Settings) string {
		switch d := *of(s); {
		case d == 0:
			return ""
		case d < 0:
			return "forever"
		default:
			return d.String()
		}
	}
	return settingField{name, text, func(s *codeq.Settings, p url.Values, name string) (err error) {
		*of(s), err = durationParam(p, name)
		return err
	}}
}

func setRate(s *codeq.Settings, p url.Values, name string) (err error) {
	if s.Rate = 0; p.Get(name) == "" {
		return nil
	}
	if s.Rate, err = strconv.ParseFloat(p.Get(name), 64); err != nil || math.IsNaN(s.Rate) {
		return invalid(name, "a number of tasks a second")
	}
	return nil
}

func weightsText(s *codeq.Settings) (text string) {
	for _, tenant := range slices.Sorted(maps.Keys(s.TenantWeights)) {
		text += fmt.Sprintf("%s=%d\n", tenant, s.TenantWeights[tenant])
	}
	return text
}

func setWeights(s *codeq.Settings, p url.Values, name string) error {
	s.TenantWeights = nil
	for text := range strings.SplitSeq(p.Get(name), "\n") {
		if text == "" {
			continue
		}
		at := strings.LastIndexByte(text, '=') // a name may also contain one
		weight, err := strconv.Atoi(strings.TrimSpace(text[at+1:]))
		if at < 0 || err != nil {
			return invalid(name, "lines of the form tenant=weight")
		}
		if s.TenantWeights == nil {
			s.TenantWeights = make(map[string]int)
		}
		s.TenantWeights[text[:at]] = weight
	}
	return nil
}

// settingsForm changes the edited settings of a form. The others stay.
func (d *Dashboard) settingsForm(w http.ResponseWriter, r *request) error {
	p := r.params
	queue := p.Get("queue")
	var refused error
	err := d.q.Configure(r.Context(), queue, func(s *codeq.Settings) {
		next := *s
		if refused = changeSettings(&next, p); refused == nil {
			*s = next
		}
	})
	if err == nil {
		err = refused
	}
	d.audited(r, p, err, false)
	if err != nil {
		return err
	}
	d.back(w, r, "settings", "")
	return nil
}

// changeSettings applies the edited fields of a form. Missing and unedited fields leave their
// settings alone, so that a form does not undo a concurrent change.
func changeSettings(s *codeq.Settings, p url.Values) error {
	for _, f := range settingFields {
		was, known := sent(p, "was-"+f.name)
		text, changed := sent(p, f.name)
		if f.name == holdGroups && known && !changed {
			text, changed = "false", true
		}
		now := f.text(s)
		switch {
		case !changed || known && text == was || text == now:
			continue
		case known && now != was:
			return &refusal{http.StatusConflict, "conflict", fmt.Sprintf(
				"%s has become %q meanwhile; the form had %q: nothing was changed, look at the page again", f.name, now, was)}
		}
		if err := f.set(s, url.Values{f.name: {text}}, f.name); err != nil {
			return err
		}
	}
	return nil
}

// sent returns a field of a form, without the carriage returns that a browser adds.
func sent(p url.Values, name string) (text string, has bool) {
	return strings.ReplaceAll(p.Get(name), "\r", ""), p.Has(name)
}

// durationParam reads a duration such as 1h30m, 7d or forever; "": 0.
func durationParam(p url.Values, name string) (time.Duration, error) {
	text := strings.TrimSpace(p.Get(name))
	if text == "" {
		return 0, nil
	}
	if text == "forever" {
		return codeq.Forever, nil
	}
	if days, ok := strings.CutSuffix(text, "d"); ok {
		if n, err := strconv.Atoi(days); err == nil && n >= 0 && n < 100_000 {
			return time.Duration(n) * 24 * time.Hour, nil
		}
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, invalid(name, "a duration such as 90s, 1h30m or 7d, or forever")
	}
	return d, nil
}
