package permits

import (
	"time"

	"codeq/internal/wire"
)

// Limits are the settings of a queue that permits enforce.
type Limits struct {
	Concurrency int     // leases at once; 0: no limit
	Rate        float64 // leases granted a second; 0: no limit
	Burst       int     // leases granted at once, by Rate
}

// Any reports whether there is a limit.
func (l *Limits) Any() bool { return l.Concurrency > 0 || l.Rate > 0 }

// Report is a message of a shard about its permits of a queue.
type Report struct {
	Epoch  uint64 // of the shard's leader: each later one has a larger number
	Seq    uint64 // in the epoch
	Try    uint64 // grows when the report is sent again
	Held   int    // permits, with a lease or unused
	Unused int
	Spent  uint64 // in the epoch

	// Idle is the time since the last lease under the rate; only in an answer to a question.
	Idle time.Duration
}

// after reports whether r is later than other.
func (r *Report) after(other *Report) bool {
	if r.Epoch != other.Epoch {
		return r.Epoch > other.Epoch
	}
	if r.Seq != other.Seq {
		return r.Seq > other.Seq
	}
	return r.Try > other.Try
}

// append appends the report, for readReport.
func (r *Report) append(dst []byte) []byte {
	for _, n := range [...]uint64{r.Epoch, r.Seq, r.Try, uint64(r.Held), uint64(r.Unused), r.Spent} {
		dst = wire.AppendUint(dst, n)
	}
	return dst
}

// readReport reads a report written by append.
func readReport(r *wire.Reader) Report {
	return Report{
		Epoch: r.Uint(), Seq: r.Uint(), Try: r.Uint(), Held: readCount(r), Unused: readCount(r), Spent: r.Uint(),
	}
}

// readCount reads a number of permits.
func readCount(r *wire.Reader) int {
	n := int(r.Uint())
	if n < 0 {
		r.Fail()
		return 0
	}
	return n
}

// Question is that of a new allocator to a shard, which answers with its Report.
type Question struct {
	Queue    string
	Settings []byte // of the queue
	Report
}

func (q *Question) Append(dst []byte) []byte {
	return wire.AppendBytes(wire.AppendBytes(dst, q.Queue), q.Settings)
}

func (q *Question) Read(r *wire.Reader) { q.Queue, q.Settings = r.String(), r.Bytes() }

func (q *Question) AppendReply(dst []byte) []byte {
	return wire.AppendUint(q.Report.append(dst), uint64(q.Idle/time.Millisecond))
}

func (q *Question) ReadReply(r *wire.Reader) {
	q.Report = readReport(r)
	q.Idle = time.Duration(min(r.Uint(), maxIdle)) * time.Millisecond
}

func (q *Question) Again() {}

// maxIdle bounds Idle, in ms: some 139 years.
const maxIdle = 1 << 42

// Request is a report that asks for permits.
type Request struct {
	Report
	Want int
	Wait bool // the answer may wait for a permit: the last one was that there is none

	// The next lease of the shard; 0: not known.
	Rank  uint64 // of its priority
	Share uint64 // of the tenants with tasks of this priority in the shard
}

// Append appends the request, for ReadRequest.
func (r *Request) Append(dst []byte) []byte {
	dst = wire.AppendBool(wire.AppendUint(r.Report.append(dst), uint64(r.Want)), r.Wait)
	return wire.AppendUint(wire.AppendUint(dst, r.Rank), r.Share)
}

// ReadRequest reads a request written by Append.
func ReadRequest(from *wire.Reader) Request {
	return Request{Report: readReport(from), Want: readCount(from), Wait: from.Bool(), Rank: from.Uint(), Share: from.Uint()}
}

// Answer is the answer of the allocator to a request.
type Answer struct {
	Granted int
	Over    bool // there are more leases than the limit
}

// Append appends the answer, for ReadAnswer.
func (a Answer) Append(dst []byte) []byte {
	return wire.AppendBool(wire.AppendUint(dst, uint64(a.Granted)), a.Over)
}

// ReadAnswer reads an answer written by Append.
func ReadAnswer(r *wire.Reader) Answer { return Answer{readCount(r), r.Bool()} }
