package killtest

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/guard"
	"codeq/internal/testkit"
)

// The tests run this test binary again as children. The environment has the kind of a child, and
// its configuration in JSON.
const (
	kindEnv   = "CODEQ_CHILD"
	configEnv = "CODEQ_CHILD_CONFIG"
)

// kinds are the functions of the children.
var kinds = map[string]func(config []byte) error{
	"crash": configured(crashChild), "node": configured(clusterChild), "slow": configured(slowChild),
	"suspect": configured(suspectChild), "hung": configured(hungChild), "steps": configured(stepsChild),
}

func configured[C any](child func(C) error) func(config []byte) error {
	return func(config []byte) error {
		var c C
		if err := json.Unmarshal(config, &c); err != nil {
			return err
		}
		return child(c)
	}
}

func TestMain(m *testing.M) {
	guard.Observe(func(what string, value any, stack []byte) { // a child ends, and its parent notices it
		fmt.Fprintf(os.Stderr, "codeq has panicked in %s: %v\n%s", what, value, stack)
		os.Exit(2)
	})
	kind := os.Getenv(kindEnv)
	if kind == "" {
		os.Exit(m.Run())
	}
	if err := kinds[kind]([]byte(os.Getenv(configEnv))); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", kind, err)
		os.Exit(1)
	}
}

// child is a process that runs.
type child struct {
	*exec.Cmd
	stdin io.WriteCloser
	read  chan struct{} // closed when its standard output is read
}

// thisBuild is this test binary.
func thisBuild(t *testing.T) string {
	exe, err := os.Executable()
	require.NoError(t, err)
	return exe
}

// command is the command that runs a child of a test binary: this one, or that of another build.
func command(t *testing.T, build, kind string, config any) *exec.Cmd {
	conf, err := json.Marshal(config)
	require.NoError(t, err)
	cmd := exec.Command(build, "-test.run=^$")
	cmd.Env = append(os.Environ(), kindEnv+"="+kind, configEnv+"="+string(conf))
	return cmd
}

// start starts a child. read reads its standard output, on a goroutine.
func start(t *testing.T, cmd *exec.Cmd, read func(out io.Reader)) *child {
	t.Helper()
	c := &child{Cmd: cmd, read: make(chan struct{})}
	cmd.Stderr = os.Stderr
	var err error
	c.stdin, err = cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	go func() {
		defer close(c.read)
		read(out)
	}()
	return c
}

// kill ends a child without a warning.
func (c *child) kill() {
	_ = c.Process.Kill() // it may have ended by itself
	_ = c.wait()
}

// wait waits for the end of a child, and returns an error unless it succeeds.
func (c *child) wait() error {
	<-c.read
	return c.Wait()
}

// reports calls each with the reports of a child: a line of JSON each.
func reports[R any](each func(R)) func(out io.Reader) {
	return func(out io.Reader) {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var r R
			if json.Unmarshal(lines.Bytes(), &r) == nil {
				each(r)
			}
		}
	}
}

// The events of a node, or of another child.
const (
	nodeLeads      = 'B' // number: a shard; the node begins to lead it
	nodeLeadsNot   = 'E' // number: a shard; the node no longer leads it
	nodeCaughtUp   = 'F' // has applied all entries that the shards' leaders had at its start
	nodeProduced   = 'P' // acknowledged
	nodeClaimed    = 'L' // acknowledged
	nodeFinishing  = 'S' // a call of Complete follows
	nodeUnfinished = 'U' // Complete has certainly not been applied
	nodeCompleted  = 'C' // acknowledged
	nodeDrained    = 'D' // number: tasks left when no work is left
	nodeFormat     = 'V' // number: the oldest format of a shard, once all are known
)

// nodeEvent is a report of few bytes: a pipe does not split it.
type nodeEvent struct {
	kind    byte
	id      codeq.ID
	number  uint64 // the payload of the task, unless the kind has another number
	attempt int
	at      time.Time
}

const nodeEventLen = 1 + 16 + 8 + 8 + 8

func (e nodeEvent) report() {
	b := append(make([]byte, 0, nodeEventLen), e.kind)
	b = append(b, e.id[:]...)
	b = binary.BigEndian.AppendUint64(b, e.number)
	b = binary.BigEndian.AppendUint64(b, uint64(e.attempt))
	b = binary.BigEndian.AppendUint64(b, uint64(time.Now().UnixNano()))
	if _, err := os.Stdout.Write(b); err != nil {
		os.Exit(1) // the parent has ended
	}
}

func parseNodeEvent(b []byte) nodeEvent {
	return nodeEvent{
		kind: b[0], id: codeq.ID(b[1:17]), number: binary.BigEndian.Uint64(b[17:]),
		attempt: int(binary.BigEndian.Uint64(b[25:])), at: time.Unix(0, int64(binary.BigEndian.Uint64(b[33:]))),
	}
}

// events calls each with the events of a child.
func events(t *testing.T, each func(nodeEvent)) func(out io.Reader) {
	return func(out io.Reader) {
		r := bufio.NewReader(out)
		var b [nodeEventLen]byte
		for {
			if _, err := io.ReadFull(r, b[:]); err != nil {
				if !errors.Is(err, io.EOF) {
					t.Errorf("a report ends in the middle: %v", err)
				}
				return
			}
			each(parseNodeEvent(b[:]))
		}
	}
}

// threePeers are the nodes of a cluster, on free ports.
func threePeers(t *testing.T, intN func(n int) int) (peers []codeq.Peer) {
	first := testkit.FreePorts(t, intN, 3)
	for i := range 3 {
		peers = append(peers, codeq.Peer{Node: fmt.Sprint("n", i), Address: fmt.Sprint("127.0.0.1:", first+i)})
	}
	return peers
}

// childLogger logs to the standard error if CODEQ_LOG is set.
func childLogger() *slog.Logger {
	if os.Getenv("CODEQ_LOG") == "" {
		return nil
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}
