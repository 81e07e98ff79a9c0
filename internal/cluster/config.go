package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"
	"unicode/utf8"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/raftlog"
)

// Config is the configuration of a Node. Users give the fields before Directory; SetDefaults checks
// these.
type Config struct {
	Node             string // its name
	Listen           string // address; not used if there is a Listener
	Listener         net.Listener
	Advertise        string        // the address that others dial; "": that of Listen or Listener
	Peers            []Peer        // founders of a new cluster; or members of the one to join
	Join             bool          // an existing cluster
	TLS              *tls.Config   // nil: none
	AllowAnonymous   bool          // with TLS, of nodes that dial
	HeartbeatTimeout time.Duration // of silence until a follower misses its leader
	ElectionTimeout  time.Duration // of an election
	CallTimeout      time.Duration // how long a call waits for a shard
	StallAfter       time.Duration // how long an operation on files may take; Disk reports longer ones
	LeaveOnClose     bool

	Directory *manifest.Directory
	Sync      raftlog.Sync
	MinFree   int64 // bytes; see logRoom
	MaxAppend int   // largest number of entries in a message between nodes; at most the constant
	HidesRoom bool  // the node does not report the room on its disk; for tests
	Newest    int   // newest format of this build; 0: manifest.Format. Tests set less
	// PebbleFormat is Pebble's format of the log, by that of the directory. Default:
	// manifest.PebbleFormat
	PebbleFormat func(format int) uint64
	Logger       *slog.Logger
	// SnapshotBytes is the number of bytes of log between two snapshots; half as much stays.
	SnapshotBytes int64

	// Disk watches the operations on the files of the node; see WatchDisk. nil: only the votes are
	// watched, with an hour as their limit.
	Disk *failstop.Watch

	// Machines are the shards.
	Machines []StateMachine
	// Reconcile makes the stores of all Machines agree with each other; differ: they may be of
	// different moments. It is called when they are open, before a cluster begins from them.
	Reconcile func(differ bool) error
	// Leaders calls the leaders of the shards, here or on other nodes.
	Leaders Leaders
	// Serve answers a call of another node for a shard, of a kind below OwnKinds. The caller gets
	// the error that it returns.
	Serve func(shard int, r *peer.Request) error
	// ServeNode answers a call of another node that is not for a shard (AskNodes). It may wait for
	// as long as ctx lasts.
	ServeNode func(ctx context.Context, body []byte) ([]byte, error)
	// Removed is called once, with the error of calls from then on, when this node was removed from
	// the cluster, and all shards have removed it as far as it knows. It must not wait. nil: not
	// called.
	Removed func(error)
	// EncodeError and DecodeError convert errors for messages between nodes.
	EncodeError func(error) (code byte, text string)
	DecodeError func(code byte, text string) error
	// PanicError is the error for a panic of a goroutine.
	PanicError func(what string, value any, stack []byte) error

	// Tests replace these.
	Wall  func() time.Time                                         // nil: time.Now
	Mono  func() time.Time                                         // nil: time.Now
	Dial  func(ctx context.Context, addr string) (net.Conn, error) // nil: TCP, by TLS if there is one
	Votes func(path string) (raftlog.Stables, error)               // nil: raftlog.OpenStable
	Log   func(*raftlog.Group) LogStore                            // nil: the group itself
}

const (
	MaxNodeName = 255 // bytes of a node's name
	MaxAddress  = 300 // bytes of its address; the name of a host has 253 at most
)

const (
	MinTimeout = 20 * time.Millisecond
	maxTimeout = time.Hour
)

// SetDefaults sets the fields that are zero and have defaults. It returns the field of
// codeq.Cluster that is out of bounds, with its value and the allowed values; "": none is.
func (c *Config) SetDefaults() (field string, value any, limit string) {
	if limit := CheckName(c.Node); limit != "" {
		return "Cluster.Node", base.Shortly(c.Node), limit
	}
	if c.Listen == "" && c.Listener == nil {
		return "Cluster.Listen", `""`, "an address, or a Listener"
	}
	if c.TLS != nil && c.TLS.ClientAuth != tls.RequireAndVerifyClientCert && !c.AllowAnonymous {
		return "Cluster.TLS.ClientAuth", c.TLS.ClientAuth, "RequireAndVerifyClientCert, unless Cluster.AllowAnonymous is set"
	}
	if err := checkCertificate(c.TLS, c.Node, c.AllowAnonymous); err != nil {
		return "Cluster.TLS", err, fmt.Sprintf("a certificate for %q", c.Node)
	}
	if c.Advertise = cmp.Or(c.Advertise, c.Listen); c.Advertise == "" {
		c.Advertise = c.Listener.Addr().String()
	}
	if limit := CheckPeerAddress(c.Advertise, c.Dial != nil); limit != "" {
		return "Cluster.Advertise", base.Shortly(c.Advertise), limit
	}
	if field, value, limit := c.checkPeers(); limit != "" {
		return field, value, limit
	}
	c.HeartbeatTimeout = cmp.Or(c.HeartbeatTimeout, 500*time.Millisecond)
	c.ElectionTimeout = cmp.Or(c.ElectionTimeout, c.HeartbeatTimeout)
	c.CallTimeout = cmp.Or(c.CallTimeout, 10*time.Second)
	for _, of := range []struct {
		name string
		d    time.Duration
	}{
		{"Cluster.HeartbeatTimeout", c.HeartbeatTimeout}, {"Cluster.ElectionTimeout", c.ElectionTimeout}, {"Cluster.CallTimeout", c.CallTimeout},
	} {
		if of.d < MinTimeout || of.d > maxTimeout {
			return of.name, of.d, fmt.Sprint(MinTimeout, " to ", maxTimeout)
		}
	}
	if c.ElectionTimeout < c.HeartbeatTimeout {
		return "Cluster.ElectionTimeout", c.ElectionTimeout, "HeartbeatTimeout or more"
	}
	return "", nil, ""
}

func (c *Config) checkPeers() (field string, value any, limit string) {
	names, addresses := make(map[string]bool), make(map[string]bool)
	for _, p := range c.Peers {
		of := "Cluster.Peers: address of " + p.Node
		if limit := CheckName(p.Node); limit != "" {
			return "Cluster.Peers: node", base.Shortly(p.Node), limit
		}
		if names[p.Node] {
			return "Cluster.Peers", strconv.Quote(p.Node), "nodes with a name of their own"
		}
		if limit := CheckPeerAddress(p.Address, c.Dial != nil); limit != "" {
			return of, base.Shortly(p.Address), limit
		}
		if addresses[p.Address] {
			return of, strconv.Quote(p.Address), "an address of its own"
		}
		names[p.Node], addresses[p.Address] = true, true
	}
	if c.Join && len(c.Peers) == 0 {
		return "Cluster.Peers", "none", "nodes of the cluster to join"
	}
	return "", nil, ""
}

// CheckName returns which names a node may have; "": this one.
func CheckName(name string) (limit string) {
	if name == "" || len(name) > MaxNodeName || !utf8.ValidString(name) {
		return fmt.Sprintf("1 to %d bytes of UTF-8", MaxNodeName)
	}
	return ""
}

// CheckPeerAddress returns which addresses a node may have; "": this one. dials: a test connects
// nodes, so that any address will do.
func CheckPeerAddress(address string, dials bool) (limit string) {
	if err := checkAddress(address); !dials && err != nil || address == "" {
		return fmt.Sprint("host:port, which other nodes can dial; ", err)
	}
	return ""
}

// checkAddress returns an error if an address is not a host and a port that other nodes can dial.
func checkAddress(address string) error {
	if len(address) > MaxAddress {
		return fmt.Errorf("it has %d bytes", len(address))
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	if ip := net.ParseIP(host); host == "" || ip.IsUnspecified() {
		return errors.New("it has no host")
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("%q is no port", port)
	}
	return nil
}
