package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"codeq"
)

func (a *app) infoCommand() *cli.Command {
	return &cli.Command{
		Name: "info", Category: categorySee, ArgsUsage: "[QUEUE]",
		Usage: "counts, totals and settings of all queues, or of one with its days",
		Description: "Shows each queue with the number of its tasks in each state, the time since when its oldest\n" +
			"ready task waits, and the totals of its events. With -storage, also the shards of the store;\n" +
			"if a process has the queue open, also its workers.",
		Flags:         []cli.Flag{&cli.BoolFlag{Name: "storage", Usage: "show the shards of the store as well"}},
		ShellComplete: a.completeQueues,
		Action:        a.info,
	}
}

// infoResult is the JSON output of info.
type infoResult struct {
	At      where
	Queues  []codeq.QueueInfo
	Days    []codeq.DayTotals   `json:",omitempty"` // of one queue
	Workers []codeq.WorkerInfo  `json:",omitempty"`
	Storage *codeq.StorageStats `json:",omitempty"`
}

func (a *app) info(ctx context.Context, c *cli.Command) error {
	name := c.Args().First()
	return a.withView(ctx, c, func(v view, at where) error {
		r := infoResult{At: at}
		var err error
		if r.Queues, err = v.Info(ctx); err != nil {
			return err
		}
		if name != "" {
			r.Queues = slices.DeleteFunc(r.Queues, func(i codeq.QueueInfo) bool { return i.Queue != name })
			if r.Days, err = v.TotalsByDay(ctx, name); err != nil {
				return err
			}
			if len(r.Queues) == 0 && len(r.Days) == 0 {
				return fmt.Errorf("%w: queue %q", codeq.ErrNotFound, name)
			}
		}
		if s, ok := v.(steerer); ok && name == "" {
			if r.Workers, err = s.Workers(ctx); err != nil {
				return err
			}
		}
		if c.Bool("storage") {
			if r.Storage, err = v.StorageStats(); err != nil {
				return err
			}
		}
		if a.asJSON {
			return a.json(r)
		}
		return a.showInfo(&r, name)
	})
}

func (a *app) showInfo(r *infoResult, name string) error {
	switch {
	case r.At.Killed:
		a.note("The process that had the queue open was killed: this is what it has left.")
	case r.At.Kind == whereClosed:
		a.note("No process has the queue open.")
	}
	if err := a.table(a.queueTable(r.Queues)); err != nil {
		return err
	}
	if name != "" {
		for _, q := range r.Queues {
			if err := a.gap("Settings"); err != nil {
				return err
			}
			if err := a.showSettings(q.Settings); err != nil {
				return err
			}
		}
		t := newTable("DAY", ">PRODUCED", ">CLAIMED", ">COMPLETED", ">RETRIED", ">EXPIRED", ">RELEASED", ">DEAD", ">CANCELED", ">UNHANDLED")
		for _, d := range r.Days {
			n := d.Totals
			t.add(d.Day.Format("2006-01-02"), n.Produced, n.Claimed, n.Completed, n.Retried, n.Expired, n.Released, n.Dead, n.Canceled, n.Unhandled)
		}
		if err := a.section("Days (UTC)", t); err != nil {
			return err
		}
	}
	if len(r.Workers) > 0 {
		if err := a.section("Workers", a.workerTable(r.Workers)); err != nil {
			return err
		}
	}
	if r.Storage == nil {
		return nil
	}
	if err := a.section("Storage", storageTable(r.Storage)); err != nil {
		return err
	}
	return a.section("Disk", diskTable(r.Storage))
}

// gap writes a title below an empty line.
func (a *app) gap(title string) error {
	_, err := fmt.Fprintf(a.out, "\n%s\n", title)
	return err
}

// section writes a table below a title.
func (a *app) section(title string, t *table) error {
	if err := a.gap(title); err != nil {
		return err
	}
	return a.table(t)
}

func (a *app) queueTable(queues []codeq.QueueInfo) *table {
	t := newTable("QUEUE", ">READY", ">SCHEDULED", ">BLOCKED", ">LEASED", ">DEAD", ">DONE", ">CANCELED", ">OLDEST", ">PRODUCED", ">COMPLETED", ">FAILED", "STATE")
	for _, q := range queues {
		n := q.Counts
		t.add(q.Queue, n.Ready, n.Scheduled, n.Blocked, n.Leased, n.Dead, n.Done, n.Canceled, a.age(q.OldestReady),
			q.Totals.Produced, q.Totals.Completed, failures(q.Totals), queueState(&q))
	}
	return t
}

// queueState returns the reasons why workers get no tasks of a queue.
func queueState(q *codeq.QueueInfo) string {
	var all []string
	if q.Settings.Paused {
		all = append(all, "paused")
	}
	if q.Held > 0 {
		all = append(all, fmt.Sprintf("%d held", q.Held))
	}
	return strings.Join(all, ", ")
}

// failures returns the number of failed attempts.
func failures(t codeq.Totals) uint64 { return t.Retried + t.Expired + t.Dead }

func (a *app) workerTable(workers []codeq.WorkerInfo) *table {
	t := newTable("WORKER", "NODE", ">BUSY", ">OF", ">SINCE", "STATE", "QUEUES")
	for _, w := range workers {
		state := "works"
		switch {
		case w.LastError != "":
			state = clip(w.LastError, payloadCells)
		case w.Quiet:
			state = "quiet"
		}
		if len(w.Hung) > 0 {
			oldest := slices.MinFunc(w.Hung, func(a, b codeq.HungHandler) int { return a.Since.Compare(b.Since) })
			state += fmt.Sprintf(", %d hung, %s for %s", len(w.Hung), oldest.ID, a.age(oldest.Since))
		}
		t.add(w.Name, w.Node, w.Busy, w.Concurrency, a.age(w.Since), state, clip(fmt.Sprint(w.Queues), payloadCells))
	}
	return t
}

func storageTable(s *codeq.StorageStats) *table {
	t := newTable(">SHARD", ">DISK", ">TABLES", ">TABLE BYTES", ">DEAD BYTES", ">MEMORY", ">LOG", ">READ AMP")
	for i := range s.Shards {
		n := &s.Shards[i]
		if n.LastError != "" {
			t.add(i, "-", "-", "-", "-", "-", "-", "-")
			continue
		}
		t.add(i, sizeText(n.DiskBytes), n.Tables, sizeText(n.TableBytes), sizeText(n.DeadBytes), sizeText(n.MemTableBytes), sizeText(n.LogBytes), n.ReadAmp)
	}
	return t
}

func diskTable(s *codeq.StorageStats) *table {
	t := newTable(">FREE", ">NO TASKS BELOW")
	free, low := "not known", "-" // no limit on free space
	if s.FreeBytes >= 0 {
		free = sizeText(s.FreeBytes)
	}
	if s.MinFreeBytes > 0 {
		low = sizeText(s.MinFreeBytes)
	}
	t.add(free, low)
	return t
}
