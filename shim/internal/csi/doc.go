// Package csi speaks CSI to plugins. A Fleet holds one connection per plugin task; its methods are CSI calls with the
// requests and answers of requests.go. CSI's generated types stay in this package.
//
// A link is one connection to one plugin process. The process says over its link what it is before it gets any other
// call, and gets none if it is not what is registered: another process may listen at the socket by now.
//
// Plugins are not trusted. Each call has a size limit, answers are read nil-safe and are the plugin's word until the
// caller has checked them. Texts are bounded, and secrets are masked in them: those that the call carries, those that
// the plugin was sent before (D2. TestSecretsDoNotLeakIntoOtherCalls), and those that the caller names. Every call that
// may have been sent and failed is a *registry.CallError, whose outcome says whether it may still take effect (D1.
// TestOutcomeOfEveryCode).
package csi
