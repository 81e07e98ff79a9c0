package codeqweb

import (
	"context"
	"maps"
	"net/http"
	"net/url"
	"time"

	"codeq"
)

// ticksShown is the number of next ticks that are shown.
const ticksShown = 5

// scheduleView is a schedule on the page of schedules.
type scheduleView struct {
	codeq.ScheduleInfo
	Upcoming []time.Time
	Payload  payloadView
	Hidden   bool
}

// schedules returns all schedules, without the parts that a request may not see.
func (d *Dashboard) schedules(ctx context.Context, r *request) ([]scheduleView, error) {
	all, err := d.q.Schedules(ctx)
	if err != nil {
		return nil, err
	}
	views := make([]scheduleView, 0, len(all))
	for _, s := range all {
		s.Task = d.shown(r, &codeq.TaskInfo{Task: s.Task}).Task
		views = append(views, scheduleView{ScheduleInfo: s, Upcoming: s.Upcoming(ticksShown), Hidden: !r.access.Has(Payloads)})
	}
	return views, nil
}

func (d *Dashboard) schedulesPage(w http.ResponseWriter, r *request) error {
	all, err := d.schedules(r.Context(), r)
	if err != nil {
		return err
	}
	for i := range all {
		if !all[i].Hidden {
			all[i].Payload = d.payload(all[i].Task.Queue, all[i].Task.Payload)
		}
	}
	return d.show(w, r, page{Title: "Schedules", Screen: "schedules", Refresh: 5, Body: all})
}

// schedule finds a schedule.
func (d *Dashboard) schedule(ctx context.Context, name string) (codeq.Schedule, error) {
	all, err := d.q.Schedules(ctx)
	if err != nil {
		return codeq.Schedule{}, err
	}
	for _, s := range all {
		if s.Name == name {
			return s.Schedule, nil
		}
	}
	return codeq.Schedule{}, &refusal{http.StatusNotFound, "not-found", "no schedule has this name"}
}

// trigger produces the task of a schedule now, with the headers of a tick.
func (d *Dashboard) trigger(ctx context.Context, p url.Values) (any, error) {
	s, err := d.schedule(ctx, p.Get("name"))
	if err != nil {
		return nil, err
	}
	t := s.Task
	if t.Headers = maps.Clone(t.Headers); t.Headers == nil {
		t.Headers = make(map[string]string)
	}
	t.Headers[codeq.TickHeader] = time.Now().UTC().Truncate(time.Millisecond).Format("2006-01-02T15:04:05.999Z07:00")
	t.Headers[codeq.ScheduleHeader] = s.Name
	id, err := d.q.Produce(ctx, t)
	return idOnly{id}, err
}
