package codeqweb

import (
	"context"
	"net/http"
	"net/url"
	"strings"
	"time"

	"codeq"
)

const (
	ticksShown    = 5   // next ticks of a schedule
	schedulesRows = 100 // on a page
)

// schedulesView is the content of the page of schedules.
type schedulesView struct {
	Rows        []scheduleView
	Find        string // a part of the names; "": all
	Found       int    // on all pages
	First, Next string // links; "": none
}

// scheduleView is a schedule on the page of schedules.
type scheduleView struct {
	codeq.ScheduleInfo
	Upcoming   []time.Time
	ClockNotes []string      // of skipped and doubled ticks
	Runs       []scheduleRun // the newest first
	RunsRead   int           // tasks of its queue among which Runs were found
	RunsAll    bool          // these were all
	Payload    payloadView
	Hidden     bool
}

// Zone returns the name of the time zone; "": it has none.
func (v *scheduleView) Zone() string {
	switch {
	case v.Cron == "":
		return ""
	case v.TimeZone == "":
		return "UTC"
	}
	return v.TimeZone
}

// Period is its Every, as "1h30m" in place of "1h30m0s".
func (v *scheduleView) Period() string {
	text := v.Every.String()
	if short, ok := strings.CutSuffix(text, "m0s"); ok {
		text = short + "m"
	}
	if short, ok := strings.CutSuffix(text, "h0m"); ok {
		text = short + "h"
	}
	return text
}

// MissedWords says what the schedule does about missed ticks.
func (v *scheduleView) MissedWords() string {
	switch v.Missed {
	case codeq.MissedSkip:
		return "of missed runs, none comes later"
	case codeq.MissedAll:
		return "missed runs all come later"
	default:
		return "of missed runs, one comes later"
	}
}

// schedules returns schedules as they are shown, without the parts that a request may not see.
func (d *Dashboard) schedules(ctx context.Context, r *request, all []codeq.ScheduleInfo) (_ []scheduleView, err error) {
	runs := new(lastRuns)
	if len(all) > 0 {
		if runs, err = d.runs.get(ctx); err != nil {
			return nil, err
		}
	}
	now := time.Now()
	views := make([]scheduleView, 0, len(all))
	for _, s := range all {
		v := scheduleView{Upcoming: s.Upcoming(ticksShown), ClockNotes: clockNotes(&s, now), Runs: runs.of[s.Name], Hidden: !r.access.Has(Payloads)}
		if read := runs.queues[s.Task.Queue]; read != nil {
			v.RunsRead, v.RunsAll = read.Read, read.All
		}
		s.Task = d.shown(r, &codeq.TaskInfo{Task: s.Task}).Task
		v.ScheduleInfo = s
		views = append(views, v)
	}
	return views, nil
}

// schedulesPage lists the schedules with the parameter find in their names, after the name of the
// parameter after.
func (d *Dashboard) schedulesPage(w http.ResponseWriter, r *request) error {
	all, err := d.q.Schedules(r.Context())
	if err != nil {
		return err
	}
	v := schedulesView{Find: r.params.Get("find")}
	after, part := r.params.Get("after"), strings.ToLower(v.Find)
	if after != "" {
		v.First = link("schedules", "find", v.Find)
	}
	var rows []codeq.ScheduleInfo
	for i := range all {
		if !strings.Contains(strings.ToLower(all[i].Name), part) {
			continue
		}
		v.Found++
		if all[i].Name <= after {
			continue
		}
		if len(rows) == schedulesRows {
			v.Next = link("schedules", "find", v.Find, "after", rows[schedulesRows-1].Name)
			continue
		}
		rows = append(rows, all[i])
	}
	if v.Rows, err = d.schedules(r.Context(), r, rows); err != nil {
		return err
	}
	for i := range v.Rows {
		if row := &v.Rows[i]; !row.Hidden {
			row.Payload = d.payload(row.Task.Queue, row.Task.Payload)
		}
	}
	return d.show(w, r, page{Title: "Schedules", Screen: "schedules", Refresh: 5, Body: v})
}

// apiSchedule is a schedule with its next ticks and last runs.
type apiSchedule struct {
	codeq.ScheduleInfo
	Upcoming   []time.Time
	ClockNotes []string      `json:",omitempty"` // of skipped and doubled ticks
	Runs       []scheduleRun // the newest first, of those that are kept
}

func (d *Dashboard) apiSchedules(ctx context.Context, r *request) (any, error) {
	infos, err := d.q.Schedules(ctx)
	if err != nil {
		return nil, err
	}
	all, err := d.schedules(ctx, r, infos)
	if err != nil {
		return nil, err
	}
	shown := []apiSchedule{}
	for _, s := range all {
		shown = append(shown, apiSchedule{s.ScheduleInfo, s.Upcoming, s.ClockNotes, s.Runs})
	}
	return struct {
		Schedules []apiSchedule
		Hidden    bool
	}{shown, !r.access.Has(Payloads)}, nil
}

// trigger produces the task of a schedule now.
func (d *Dashboard) trigger(ctx context.Context, p url.Values) (any, error) {
	id, err := d.q.TriggerSchedule(ctx, p.Get("name"))
	return idOnly{id}, err
}
