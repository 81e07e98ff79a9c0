package codeqweb

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Entry is one change that somebody has made, or has tried to make.
type Entry struct {
	Time   time.Time
	User   string `json:",omitzero"` // as [Options.User] or [Options.Audit] says; "": neither does
	Remote string // the address from which the request came
	Action string // such as "task/cancel"
	// Target is what was changed: the ID of a task, or the name of a queue, schedule, worker or
	// node. Detail are the other parameters.
	Target string `json:",omitzero"`
	Detail string `json:",omitzero"`
	Error  string `json:",omitzero"` // why it failed, or was refused
	// Refused: the request lacked the access. Such entries are shown to Options.Audit only, and
	// have the parameters of the URL: no body was read.
	Refused bool `json:",omitzero"`
}

// auditEntries is how many entries are kept.
const auditEntries = 1000

// auditText is how many bytes of a text of an entry are kept.
const auditText = 300

// auditLog keeps the latest entries in memory.
type auditLog struct {
	hook func(*http.Request, *Entry)

	mu      sync.Mutex
	entries []Entry // the oldest first
}

// add tells the hook of a change, which may name the user, and keeps the entry, which says so if
// the hook panics.
func (l *auditLog) add(r *http.Request, e Entry) {
	e.Time, e.Remote = time.Now(), r.RemoteAddr
	e.Action = strings.Clone(e.Action) // not with the URL of which it is a part
	e.Target, e.Detail, e.Error = clip(e.Target, auditText), clip(e.Detail, auditText), clip(e.Error, auditText)
	if l.hook != nil {
		if err := contained("Options.Audit", func() { l.hook(r, &e) }); err != nil {
			e.Error = strings.TrimPrefix(e.Error+"; "+err.Error(), "; ")
		}
	}
	if e.Refused {
		return
	}
	e.User = clip(e.User, auditText)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.entries) == auditEntries {
		l.entries = slices.Delete(l.entries, 0, 1)
	}
	l.entries = append(l.entries, e)
}

// newest returns the entries, the newest first.
func (l *auditLog) newest() []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	entries := slices.Clone(l.entries)
	slices.Reverse(entries)
	return entries
}

// auditPage shows who has changed what.
func (d *Dashboard) auditPage(w http.ResponseWriter, r *request) error {
	return d.show(w, r, page{Title: "Audit", Screen: "audit", Refresh: 5, Body: d.audit.newest()})
}
