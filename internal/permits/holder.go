package permits

// turn is the time, in ms, for which a shard reuses its permits before waiting shards go first.
const turn = 100

// Holder keeps the permits of a queue in one shard.
type Holder struct {
	limits Limits
	epoch  uint64
	seq    *uint64
	unused int
	spent  uint64 // number of permits ever used for a lease
	over   bool   // there may be more leases than the limit: permits go back when leases end

	reported Report // the last report to the allocator, plus the permits granted since
	sure     bool   // the allocator has received or will receive that report
	since    uint64 // time of that report; ms
	open     bool   // reported was a request that has not been answered
	waits    bool   // that request waits until there is a permit
	dry      bool   // the last answer was that there is none
}

// NewHolder returns the Holder of a shard under the leader of an epoch: its only permits are those
// of the present leases. seq is the number of the shard's last report for any queue; the Holder
// increments it with each report.
func NewHolder(epoch uint64, seq *uint64, l Limits) Holder {
	h := Holder{epoch: epoch, seq: seq}
	h.Set(l)
	return h
}

// Set changes the limits. Unused permits go back: they may have no token, or be more than the new
// limits allow. REQUIRES: l.Any().
func (h *Holder) Set(l Limits) {
	h.limits, h.unused, h.over = l, 0, true
	h.open, h.sure = false, false
}

// Unused returns the number of permits for new leases.
func (h *Holder) Unused() int { return h.unused }

// Enter uses a permit for a lease. REQUIRES: Unused() > 0.
func (h *Holder) Enter() {
	h.unused--
	h.spent++
}

// TurnEnds reports whether shards that wait for permits should go first.
func (h *Holder) TurnEnds(now uint64) bool { return now-h.since >= turn }

// Leave records the end of n leases, and reports whether the shard may reuse their permits. If
// others wait, the permits go back.
func (h *Holder) Leave(n int, others bool) (again bool) {
	if h.limits.Concurrency == 0 || h.limits.Rate > 0 || h.over || others {
		return false
	}
	h.unused += n
	return true
}

// Report returns the report that has to be sent to the allocator now, if send is true: if the shard
// has fewer permits than the allocator knows, or wants some. It gives unneeded permits back. leased
// is the number of leases, need that of further leases if there were permits; asked: a caller needs
// an answer even if there is no permit. REQUIRES: the ends of leases have persisted.
func (h *Holder) Report(leased, need int, asked bool, now uint64) (r Request, send bool) {
	h.unused = min(h.unused, need)
	held, want := leased+h.unused, need-h.unused
	r.Want = want
	fewer := h.limits.Concurrency > 0 && held < h.reported.Held || h.limits.Rate > 0 && h.unused < h.reported.Unused
	switch {
	case h.open && !h.waits: // its answer comes at once, and may grant permits
		return r, false
	case !h.sure, fewer:
	case !h.open && want == 0, h.open && want > 0 && !asked:
		return r, false
	}
	r.Report = h.newReport(leased, now)
	r.Wait = want > 0 && !asked && h.dry
	h.open, h.sure, h.waits, h.dry = true, true, r.Wait, false
	return r, true
}

// ReportNow returns the report for an allocator that asks. It invalidates the answers to earlier
// reports. Another report follows, since another allocator may have replaced the one that asks.
func (h *Holder) ReportNow(leased int, now uint64) Report {
	h.open, h.sure = false, false
	return h.newReport(leased, now)
}

func (h *Holder) newReport(leased int, now uint64) Report {
	*h.seq++
	h.since = now
	h.reported = Report{Epoch: h.epoch, Seq: *h.seq, Held: leased + h.unused, Unused: h.unused, Spent: h.spent}
	return h.reported
}

// Answered takes an answer to r; false if it is invalid.
func (h *Holder) Answered(r *Request, a Answer) bool {
	if !h.awaits(r) {
		return false
	}
	h.open = false
	h.unused += a.Granted
	h.reported.Held += a.Granted
	h.reported.Unused += a.Granted
	h.over, h.dry = a.Over, r.Want > 0 && a.Granted == 0
	return true
}

// Unanswered records that there will be no answer to r; false if the answer would be invalid.
func (h *Holder) Unanswered(r *Request) bool {
	if !h.awaits(r) {
		return false
	}
	h.open, h.sure = false, false
	return true
}

func (h *Holder) awaits(r *Request) bool { return h.open && r.Seq == h.reported.Seq }
