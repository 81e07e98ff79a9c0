package codeqweb

import (
	"net/http"
	"net/url"
	"strings"
	"time"

	"codeq"
)

// queueLive is the part of a queue's page that the stream updates.
type queueLive struct {
	At     time.Time
	Error  string
	Known  bool
	Row    *row
	Charts *chartsView // nil in a stream
	Limits []limitView
}

// queueView is the content of the page of a queue.
type queueView struct {
	Live     queueLive
	Name     string
	Settings codeq.Settings
	Form     map[string]string // the fields of the form, by their names
	Odd      bool              // a form cannot send the names of the tenants unchanged
	Waiting  waitingTasks
	Errors   []errorKind
	Open     bool         // the settings are unfolded: they were changed
	Totals   codeq.Totals // of all days that are kept
	Days     int
}

// limitView is a limit of a queue, with the tasks that it holds back.
type limitView struct {
	Name, Of  string
	Used, Max float64 // for a meter; Max 0: it has none
	Holds     string  // "": nothing
}

// limitsOf returns the limits of a queue that are set.
func limitsOf(r *row) (limits []limitView) {
	set, c := &r.limits, &r.Counts
	if set.Concurrency > 0 {
		v := limitView{Name: "Concurrency", Of: number(c.Leased) + " of " + number(set.Concurrency) + " tasks leased", Used: float64(c.Leased), Max: float64(set.Concurrency)}
		if held := uint64(r.Held); c.Leased+held >= uint64(set.Concurrency) && c.Ready > 0 {
			v.Holds = number(c.Ready) + " ready tasks wait for a place"
		}
		limits = append(limits, v)
	}
	if set.Rate > 0 {
		claimed := float64(r.normal.completed + r.normal.failed)
		v := limitView{Name: "Rate", Of: rate(claimed) + " of " + rate(set.Rate) + " tasks a second end, over the last minute", Used: claimed, Max: set.Rate}
		if claimed > 0.9*set.Rate && c.Ready > 0 {
			v.Holds = number(c.Ready) + " ready tasks wait for the rate"
		}
		limits = append(limits, v)
	}
	if set.ConcurrencyPerKey > 0 {
		v := limitView{Name: "Concurrency per key", Of: number(set.ConcurrencyPerKey) + " tasks leased for each key"}
		if c.Blocked > 0 {
			v.Holds = "part of " + number(c.Blocked) + " blocked tasks, or all, wait for their key"
		}
		limits = append(limits, v)
	}
	return limits
}

// queueLive returns the part of the page that the stream updates.
func (d *Dashboard) queueLive(s *sample, name string) queueLive {
	v := queueLive{At: s.At, Row: &row{Name: name}}
	if s.Err != nil {
		v.Error = s.Err.Error()
	}
	if r := s.row(name); r != nil {
		v.Row, v.Known = r, true
		v.Limits = limitsOf(r)
	}
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
	v := queueView{Live: d.queueLive(s, name), Name: name, Days: codeq.TotalsDays, Open: r.params.Get("did") == "settings"}
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
	if v.Waiting, err = d.waiting(r, name, v.Settings.TenantWeights); err != nil {
		return err
	}
	if v.Errors, err = d.retriedErrors(r, name); err != nil {
		return err
	}
	days, err := d.q.TotalsByDay(ctx, name)
	if err != nil {
		return err
	}
	for i := range days {
		addTotals(&v.Totals, &days[i].Totals)
	}
	params := url.Values{"name": {name}}
	if v.Live.Charts, err = d.chartsView(ctx, name, spanOf(r.params), "queue", params); err != nil {
		return err
	}
	params.Set("page", "queue")
	return d.show(w, r, page{Title: "Queue " + name, Screen: "queue", Live: params.Encode(), Refresh: 10, Loads: chartFiles, Body: v})
}

func addTotals(sum, t *codeq.Totals) {
	sum.Produced, sum.Claimed, sum.Completed = sum.Produced+t.Produced, sum.Claimed+t.Claimed, sum.Completed+t.Completed
	sum.Retried, sum.Expired, sum.Released = sum.Retried+t.Retried, sum.Expired+t.Expired, sum.Released+t.Released
	sum.Unhandled, sum.Dead, sum.Canceled = sum.Unhandled+t.Unhandled, sum.Dead+t.Dead, sum.Canceled+t.Canceled
}
