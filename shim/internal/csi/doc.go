// Package driver speaks CSI. Fleet holds one connection per plugin task and satisfies what the use cases ask of a plugin, in their words:
// volume.Node, controller.Driver and supervise.Fleet. CSI's generated types live in this package and in the facade only.
//
// Plugins are not trusted: each call has a deadline and a size limit, what comes back is read nil-safe and checked before it is believed,
// and error texts are bounded, and secrets masked, before anybody sees them: those that the call carries, that the plugin was sent before
// (D2. TestNothingIsToldInAnotherCall), and that the caller names. Every call that may have been sent and did not end well is a
// *registry.CallError, whose outcome says whether it may still take effect (D1. TestOutcomeOfEveryCode).
package csi
