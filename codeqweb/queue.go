package codeqweb

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"codeq"
)

// tenantsRead is how many ready tasks are read to see which tenants wait.
const tenantsRead = 1000

// queueLive is the part of the page of a queue that follows the sampler.
type queueLive struct {
	At     time.Time
	Error  string
	Known  bool
	Row    row
	By     string
	Charts []chart
}

// queueView is what the page of a queue shows.
type queueView struct {
	Live     queueLive
	Name     string
	Settings codeq.Settings
	Weights  string // of the tenants, as the form has them
	Odd      bool   // a form cannot have the names of the tenants
	Totals   codeq.Totals
	Bars     []bar
	Days     int
	Top      string // the value at the top of the days
	Waiting  waitingTenants
}

// waitingTenants are the tenants of a queue that have ready tasks, or a weight.
type waitingTenants struct {
	Tenants []waitingTenant // those with the most ready tasks first
	Read    int             // ready tasks that were read
	All     bool            // there are no more
}

type waitingTenant struct {
	Name   string
	Ready  int // of those that were read
	Weight int
}

// queueLive makes the part that follows the sampler.
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

// queuePage shows a queue, with the means to change its settings.
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
	for _, tenant := range slices.Sorted(mapKeys(v.Settings.TenantWeights)) {
		v.Weights += fmt.Sprintf("%s=%d\n", tenant, v.Settings.TenantWeights[tenant])
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

func mapKeys[V any](m map[string]V) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
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

// settingsForm changes the settings of a queue as a form says.
func (d *Dashboard) settingsForm(w http.ResponseWriter, r *request) error {
	p := r.params
	queue := p.Get("queue")
	next, err := settingsOf(p)
	if err == nil {
		err = d.q.Configure(r.Context(), queue, func(s *codeq.Settings) {
			next.Paused = s.Paused // which has buttons of its own
			if !p.Has("tenant-weights") {
				next.TenantWeights = s.TenantWeights
			}
			*s = next
		})
	}
	d.audited(r, p, err, false)
	if err != nil {
		return err
	}
	d.back(w, r, "settings", "")
	return nil
}

// settingsOf reads the form of settings.
func settingsOf(p url.Values) (s codeq.Settings, err error) {
	for name, to := range map[string]*int{"concurrency": &s.Concurrency, "concurrency-per-key": &s.ConcurrencyPerKey, "burst": &s.Burst} {
		if p.Get(name) == "" {
			continue
		}
		if *to, err = intParam(p, name); err != nil {
			return s, err
		}
	}
	if text := p.Get("rate"); text != "" {
		if s.Rate, err = strconv.ParseFloat(text, 64); err != nil || math.IsNaN(s.Rate) {
			return s, invalid("rate", "a number of tasks a second")
		}
	}
	for name, to := range map[string]*time.Duration{"retention": &s.Retention, "dead-retention": &s.DeadRetention} {
		if *to, err = durationParam(p, name); err != nil {
			return s, err
		}
	}
	s.HoldGroups = p.Get("hold-groups") == "true"
	for text := range strings.SplitSeq(strings.ReplaceAll(p.Get("tenant-weights"), "\r", ""), "\n") {
		if text == "" {
			continue
		}
		at := strings.LastIndexByte(text, '=') // a name may have one as well
		weight, err := strconv.Atoi(strings.TrimSpace(text[at+1:]))
		if at < 0 || err != nil {
			return s, invalid("tenant-weights", "lines of the form tenant=weight")
		}
		if s.TenantWeights == nil {
			s.TenantWeights = make(map[string]int)
		}
		s.TenantWeights[text[:at]] = weight
	}
	return s, nil
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
